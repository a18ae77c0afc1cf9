// What a window looks at before anything is issued: each raises if it does not hold.
// Wrong arguments are kInvalid.
#include <string>

#include "backend/nccl/memory_nccl.h"
#include "backend/nccl/raising.h"
#include "backend/nccl/window_nccl.h"

namespace weightsync {
namespace {

using shm::Code;

// NCCL cuts puts into pieces of this size, and looks where each one begins.
constexpr std::size_t kPiece = std::size_t{1} << 30;

}  // namespace

c10::intrusive_ptr<ProcessGroupNccl> WindowNccl::open() const {
  const shm::Status ended = session_->failure();
  check(ended.ok(), Code::kClosed,
        [&] { return "this window is closed: " + ended.message(); });
  auto group = group_.lock();
  check(group.defined(), Code::kClosed,
        "this window is closed: its process group is gone");
  return group;
}

int WindowNccl::checked(int64_t peer, const char* call) const {
  check(peer >= 0 && peer < session_->size(), Code::kInvalid, [&] {
    return c10::str(call, ": there is no rank ", peer, " in a group of ",
                    session_->size());
  });
  return static_cast<int>(peer);
}

Place WindowNccl::place_of(int peer) const {
  const std::lock_guard<std::mutex> lock(mu_);
  check(!places_.empty(), Code::kInvalid, "no tensor is registered with this window");
  return places_[static_cast<std::size_t>(peer)];
}

WindowNccl::Target WindowNccl::target_of(const Place& place, int peer) const {
  const nccl::Windows::Round round = session_->windows()->round(place.round);
  check(round.handle != nullptr, Code::kUnsupported, [&] {
    return "the window of rank " + std::to_string(peer) +
           " was registered together with memory of rank " +
           std::to_string(session_->rank()) + ", which was freed since";
  });
  return {peer, round.handle, static_cast<std::size_t>(place.offset), round.bytes};
}

void WindowNccl::check_target(const Target& target, std::size_t offset,
                              std::size_t nbytes) const {
  const std::size_t last = offset + (nbytes - 1) / kPiece * kPiece;
  check(last < target.local_bytes, Code::kUnsupported, [&] {
    return "a put cannot begin at byte " + std::to_string(last) +
           " of the allocation of rank " + std::to_string(target.peer) +
           ": NCCL refuses what begins beyond the memory that rank " +
           std::to_string(session_->rank()) + " registered with it, which is " +
           std::to_string(target.local_bytes) + " bytes";
  });
}

void WindowNccl::check_source(const at::Tensor& tensor, const char* call) const {
  const auto allocation = allocation_of(tensor.const_data_ptr());
  check(allocation.has_value(), Code::kInvalid, [&] {
    return std::string(call) +
           ": the source is not in memory of NCCL: allocate it in "
           "torch.cuda.MemPool(backend.mem_allocator)";
  });
  check(session_->windows()->round_of(allocation->base) >= 0, Code::kInvalid, [&] {
    return std::string(call) +
           ": the source is not in registered memory: on all ranks, make a window of a "
           "tensor of its memory pool first";
  });
}

}  // namespace weightsync
