#include "repoint.h"

#include "status_error.h"

namespace weightsync {
namespace {

using shm::Code;

void release_storage(void* context) { delete static_cast<c10::Storage*>(context); }

void check_fits(const at::Tensor& tensor, const at::Tensor& memory,
                std::int64_t offset) {
  check(tensor.device() == memory.device(), Code::kInvalid, [&] {
    return c10::str("a tensor on ", tensor.device(), " cannot lie in memory on ",
                    memory.device());
  });
  check(tensor.storage_offset() == 0 && tensor.storage().nbytes() == tensor.nbytes(),
        Code::kInvalid, "a tensor does not cover its whole storage");
  const auto end = static_cast<std::uint64_t>(offset) + tensor.nbytes();
  check(offset >= 0 && end <= memory.nbytes(), Code::kInvalid, [&] {
    return "a tensor does not fit into the memory at " + std::to_string(offset);
  });
}

}  // namespace

void repoint(const std::vector<at::Tensor>& tensors,
             const std::vector<at::Tensor>& memory,
             const std::vector<std::int64_t>& offsets) {
  check(tensors.size() == offsets.size() && tensors.size() == memory.size(),
        Code::kInvalid, "repoint needs one memory and one offset for each tensor");
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    check_fits(tensors[i], memory[i], offsets[i]);
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto* const base = static_cast<std::byte*>(memory[i].mutable_data_ptr());
    auto* const owner = new c10::Storage(memory[i].storage());
    tensors[i].storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
        c10::DataPtr(base + offsets[i], owner, &release_storage, memory[i].device()));
  }
}

}  // namespace weightsync
