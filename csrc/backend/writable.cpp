#include "writable.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace weightsync {
namespace {

bool populate(const void* data, std::size_t nbytes) {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(data) / page * page;
  const auto end = reinterpret_cast<std::uintptr_t>(data) + nbytes;
  // The address is only handed to the kernel.
  void* const first = reinterpret_cast<void*>(begin);  // NOLINT: an address it is
  int failed = 0;
  do {
    failed = ::madvise(first, end - begin, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
  } while (failed == EINTR || failed == EAGAIN);
  return failed != EINVAL && failed != EFAULT && failed != ENOMEM;
}

// What can be written for certain tells whether the kernel knows the question.
bool can_ask() {
  char byte = 0;
  return populate(&byte, 1);
}

}  // namespace

std::int64_t first_unwritable(const std::vector<at::Tensor>& tensors) {
  if (!can_ask()) return -1;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const bool empty = !tensor.device().is_cpu() || tensor.nbytes() == 0;
    const void* const data = empty ? nullptr : tensor.const_data_ptr();
    if (data == nullptr) continue;
    const std::size_t rest =
        tensor.storage().nbytes() -
        static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size();
    const bool strided = !tensor.is_contiguous();
    if (!populate(data, strided ? rest : tensor.nbytes())) {
      return static_cast<std::int64_t>(i);
    }
  }
  return -1;
}

}  // namespace weightsync
