#include "backend/nccl/registration_nccl.h"

#include <algorithm>
#include <mutex>
#include <string>

#include "backend/nccl/memory_nccl.h"
#include "backend/nccl/raising.h"

namespace weightsync {
namespace {

using shm::Code;
using shm::Status;
using Words = nccl::Windows::Words;

// In place of the number of a round.
constexpr std::int64_t kMissing = -1;  // not registered yet
constexpr std::int64_t kNothing = -2;  // no memory is exposed

struct Found {
  Status status;
  Place place;
  Allocation allocation;
};

Found locate(const Session& session, const at::Tensor& tensor) {
  const auto refuse = [](Code code, std::string why) {
    return Found{{code, "a window cannot be made: " + why}, {}, {}};
  };
  if (!tensor.defined()) return refuse(Code::kInvalid, "the tensor is undefined");
  if (tensor.device() != session.device()) {
    return refuse(Code::kInvalid, "windows of this process group are on " +
                                      session.device().str() + "; found a tensor on " +
                                      tensor.device().str());
  }
  if (!tensor.is_contiguous()) {
    return refuse(Code::kInvalid, "its tensor must be contiguous");
  }
  Found found;
  found.place.nbytes = static_cast<std::int64_t>(tensor.nbytes());
  found.place.dtype = static_cast<std::int64_t>(tensor.scalar_type());
  found.place.round = kNothing;
  if (tensor.numel() == 0) return found;
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  const auto allocation = allocation_of(data);
  if (!allocation) {
    return refuse(Code::kUnsupported,
                  "its tensor is not in memory of NCCL: allocate it in "
                  "torch.cuda.MemPool(backend.mem_allocator)");
  }
  found.allocation = *allocation;
  found.place.offset = data - allocation->base;
  found.place.round = session.windows()->round_of(allocation->base);
  return found;
}

void raise_or_end(const Meeting& with, const Status& status) {
  if (status.ok()) return;
  const Status ended = with.session->failure();
  if (!ended.ok()) throw StatusError({Code::kClosed, ended.message()});
  // It goes on aside: nothing that is issued later would be in order.
  if (status.code() == Code::kTimedOut) with.watchdog->fail(with.session, status);
  raise(status);
}

// Tells all ranks, and raises what is wrong on any of them.
std::vector<Words> agree(const Meeting& with, const Status& status,
                         const Place& place = {}, std::size_t bytes = 0) {
  Session& session = *with.session;
  const Words mine{static_cast<std::int64_t>(status.code()),
                   place.round,
                   static_cast<std::int64_t>(bytes),
                   place.offset,
                   place.nbytes,
                   place.dtype};
  auto all =
      session.windows()->exchange(mine, handle_of(session.stream()), with.deadline);
  raise_or_end(with, all.status());
  raise(status);
  for (std::size_t rank = 0; rank < all.value().size(); ++rank) {
    const auto code = static_cast<Code>(all.value()[rank][0]);
    if (code == Code::kOk) continue;
    raise({code, "a window cannot be made: rank " + std::to_string(rank) +
                     " has no memory for it, and says why"});
  }
  return all.take();
}

// That each rank still has its share of the rounds that the others are in.
Status reachable(const Session& session, const std::vector<Place>& places) {
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    const std::int64_t round = places[rank].round;
    if (round < 0 || session.windows()->round(round).handle != nullptr) continue;
    return {Code::kUnsupported,
            "a window cannot be made: the memory of rank " + std::to_string(rank) +
                " was registered together with memory of rank " +
                std::to_string(session.rank()) +
                " that was freed since; take new memory on all ranks"};
  }
  return {};
}

// One more round, if any rank needs it.
void register_missing(const Meeting& with, const Found& found,
                      const std::vector<Words>& all, std::vector<Place>& places) {
  nccl::Windows& windows = *with.session->windows();
  std::int64_t largest = 0;
  bool fills = false;
  for (const Words& each : all) {
    if (each[1] == kMissing) largest = std::max(largest, each[2]);
    fills = fills || each[1] != kMissing;
  }
  if (largest == 0) {
    agree(with, reachable(*with.session, places));
    return;
  }
  void* base = found.allocation.base;
  std::size_t bytes = found.allocation.bytes;
  const bool brings = found.place.round == kMissing;
  if (fills) {
    Status filled;
    if (!brings) {
      bytes = static_cast<std::size_t>(largest);
      auto made = windows.fill_in(bytes);
      filled = made.status();
      base = made.ok() ? made.value() : nullptr;
    }
    agree(with, filled);
  }
  const std::int64_t number = windows.rounds();
  Status added = windows.add(base, bytes, with.deadline);
  if (added.code() == Code::kTimedOut) raise_or_end(with, added);
  if (added.ok() && brings) remember(found.allocation, with.session->windows());
  for (Place& each : places) {
    if (each.round == kMissing) each.round = number;
  }
  agree(with, added.ok() ? reachable(*with.session, places) : added);
}

}  // namespace

std::vector<Place> register_tensor(const Meeting& with, const at::Tensor& tensor) {
  nccl::Windows& windows = *with.session->windows();
  const std::lock_guard<std::mutex> lock(windows.meeting());
  const Found found = locate(*with.session, tensor);
  const auto all = agree(with, found.status, found.place, found.allocation.bytes);
  std::vector<Place> places;
  places.reserve(all.size());
  for (const Words& each : all) {
    places.push_back({each[1], each[3], each[4], each[5]});
  }
  register_missing(with, found, all, places);
  if (windows.rounds() > 0) {
    raise_or_end(with,
                 windows.warm_up(handle_of(with.session->stream()), with.deadline));
  }
  return places;
}

void meet_all(const Meeting& with) {
  const std::lock_guard<std::mutex> lock(with.session->windows()->meeting());
  agree(with, {});
}

}  // namespace weightsync
