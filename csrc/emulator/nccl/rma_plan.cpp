#include "emulator/nccl/rma_plan.h"

#include <algorithm>

namespace weightsync::emulator::nccl {
namespace {

constexpr int kOffsetAddedFrom = 23102;

}  // namespace

std::vector<Piece> cut(std::size_t nbytes, std::size_t piece) {
  std::vector<Piece> pieces;
  std::size_t at = 0;
  do {
    const std::size_t length = std::min(piece, nbytes - at);
    pieces.push_back({at, length, at + length == nbytes});
    at += length;
  } while (at < nbytes);
  return pieces;
}

std::optional<std::size_t> offset_beyond(const std::vector<Piece>& pieces,
                                         std::size_t offset,
                                         std::size_t local_window_nbytes) {
  for (const Piece& piece : pieces) {
    const bool beyond = offset + piece.at >= local_window_nbytes;
    if (piece.nbytes > 0 && beyond) return offset + piece.at;
  }
  return std::nullopt;
}

std::size_t target_offset(std::size_t local_window_offset, std::size_t put_offset,
                          bool through_network, int version) {
  const bool forgotten = through_network && version < kOffsetAddedFrom;
  return (forgotten ? 0 : local_window_offset) + put_offset;
}

}  // namespace weightsync::emulator::nccl
