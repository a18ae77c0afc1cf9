#include "backend/nccl/notice.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace weightsync {

using shm::Code;
using shm::Status;

Notice::Notice(c10::intrusive_ptr<c10d::Store> store, std::string key)
    : store_(std::move(store)), key_(std::move(key)) {}

void Notice::leave(const std::string& text) {
  if (!store_) return;
  try {
    store_->set(key_, std::vector<std::uint8_t>(text.begin(), text.end()));
  } catch (const std::exception&) {
    store_.reset();
  }
}

Status Notice::look() {
  if (shm::Clock::now() >= until_) return {Code::kPeer, text_};
  if (!store_ || !text_.empty()) return {};
  try {
    if (!store_->check({key_})) return {};
    const std::vector<std::uint8_t> found = store_->get(key_);
    text_.assign(found.begin(), found.end());
    until_ = shm::after(kGrace);
  } catch (const std::exception&) {
    store_.reset();
  }
  return {};
}

void Notice::remove() {
  if (!store_) return;
  try {
    store_->deleteKey(key_);
  } catch (const std::exception&) {
    // Not every store can.
  }
}

}  // namespace weightsync
