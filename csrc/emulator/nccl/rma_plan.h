// How one-sided operations of a group become batches, and a put becomes pieces. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace weightsync::emulator::nccl {

// NCCL cuts a put into pieces of at most 1 GiB; only the last one carries the signal.
struct Piece {
  std::size_t at = 0;  // from the start of the put
  std::size_t nbytes = 0;
  bool signal = false;
};

// At least one piece: a put of nothing is a signal.
std::vector<Piece> cut(std::size_t nbytes, std::size_t piece);

// The last check of a put, made for each piece at launch, and only between ranks that
// reach each other without a network: a piece must not start at or beyond the end of
// the *local* window. Its end, and the size of the peer's window, are not looked at.
// The offset of the first piece that fails.
std::optional<std::size_t> offset_beyond(const std::vector<Piece>& pieces,
                                         std::size_t offset,
                                         std::size_t local_window_nbytes);

// Where a put goes in the peer's allocation: computed from the local window, so it is
// right only if the window lies at the same offset in the allocations of both. Before
// 2.31.2 a network forgot the window's offset (NVIDIA/nccl#2198).
std::size_t target_offset(std::size_t local_window_offset, std::size_t put_offset,
                          bool through_network, int version);

}  // namespace weightsync::emulator::nccl
