#include "describe.h"

#include <string>
#include <unordered_map>

namespace weightsync {
namespace {

class Encoder {
 public:
  void number(std::int64_t value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void numbers(c10::IntArrayRef values) {
    number(static_cast<std::int64_t>(values.size()));
    for (const std::int64_t value : values) number(value);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace

pybind11::bytes describe(const std::vector<at::Tensor>& tensors) {
  Encoder encoder;
  std::unordered_map<const void*, std::int64_t> first;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const bool plain = tensor.layout() == at::kStrided && tensor.has_storage() &&
                       !tensor.unsafeGetTensorImpl()->is_python_dispatch();
    encoder.number(static_cast<std::int64_t>(tensor.scalar_type()));
    encoder.number(static_cast<std::int64_t>(tensor.device().type()));
    const bool freed =
        plain && tensor.numel() > 0 && tensor.storage().data() == nullptr;
    encoder.number((plain ? 1 : 0) | (tensor.is_conj() ? 2 : 0) |
                   (tensor.is_neg() ? 4 : 0) | (tensor.is_quantized() ? 8 : 0) |
                   (freed ? 16 : 0));
    if (!plain) continue;
    encoder.numbers(tensor.sizes());
    encoder.numbers(tensor.strides());
    if (tensor.numel() == 0 || tensor.device().is_meta()) continue;
    // Which earlier tensor shares the storage, and where in it this one starts.
    const void* const storage = tensor.storage().unsafeGetStorageImpl();
    const auto at = first.emplace(storage, static_cast<std::int64_t>(i)).first;
    encoder.number(at->second);
    if (at->second != static_cast<std::int64_t>(i)) {
      encoder.number(tensor.storage_offset() -
                     tensors[static_cast<std::size_t>(at->second)].storage_offset());
    }
  }
  return pybind11::bytes(encoder.text());
}

}  // namespace weightsync
