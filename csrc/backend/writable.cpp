#include "writable.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace weightsync {
namespace {

// The kernel takes at most so many pieces in one call (UIO_MAXIOV).
constexpr std::size_t kPieces = 1024;

// How many of these bytes could be written back, in order; all where it cannot be told.
std::size_t write_back(const std::vector<iovec>& bytes) {
  std::vector<char> values(bytes.size());
  const iovec local{values.data(), values.size()};
  const auto count = bytes.size();
  ssize_t moved = ::process_vm_readv(::getpid(), &local, 1, bytes.data(), count, 0);
  if (moved != static_cast<ssize_t>(count)) return count;
  moved = ::process_vm_writev(::getpid(), &local, 1, bytes.data(), count, 0);
  if (moved >= 0) return static_cast<std::size_t>(moved);
  return errno == EFAULT ? 0 : count;
}

}  // namespace

std::int64_t first_unwritable(const std::vector<at::Tensor>& tensors) {
  for (std::size_t from = 0; from < tensors.size(); from += kPieces) {
    const std::size_t to = std::min(tensors.size(), from + kPieces);
    std::vector<iovec> bytes;
    std::vector<std::size_t> indices;
    for (std::size_t i = from; i < to; ++i) {
      if (!tensors[i].device().is_cpu() || tensors[i].nbytes() == 0) continue;
      bytes.push_back({const_cast<void*>(tensors[i].const_data_ptr()), 1});
      indices.push_back(i);
    }
    const std::size_t written = bytes.empty() ? 0 : write_back(bytes);
    if (written < bytes.size()) return static_cast<std::int64_t>(indices[written]);
  }
  return -1;
}

}  // namespace weightsync
