#include "backend/nccl/registration_nccl.h"

#include <algorithm>
#include <mutex>
#include <random>
#include <string>
#include <utility>

#include "backend/nccl/memory_nccl.h"
#include "backend/nccl/notice.h"
#include "backend/nccl/raising.h"

namespace weightsync {
namespace {

using shm::Code;
using shm::Status;
using Words = nccl::Windows::Words;

// In place of the number of a round.
constexpr std::int64_t kMissing = -1;  // not registered yet
constexpr std::int64_t kNothing = -2;  // no memory is exposed

// For the others to come out of a registration that failed here: more than they take to
// give it up.
constexpr std::chrono::seconds kOthers = 2 * Notice::kGrace;

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

void raise_ours(const Status& status) {
  if (status.code() == Code::kInvalid) throw StatusError(status);
  raise(status);
}

// Nothing that is issued later would be in order: something of NCCL goes on aside.
[[noreturn]] void end(const Meeting& with, const Status& why) {
  const Status ended = with.session->failure();
  if (!ended.ok()) throw StatusError({Code::kClosed, ended.message()});
  with.watchdog->fail(with.session, why);
  raise_ours(why);
  throw StatusError(why);
}

void raise_or_end(const Meeting& with, const Status& status) {
  if (status.ok()) return;
  const Status ended = with.session->failure();
  if (!ended.ok()) throw StatusError({Code::kClosed, ended.message()});
  if (status.code() == Code::kTimedOut) end(with, status);
  raise_ours(status);
}

// In the name of a key.
std::int64_t any_number() {
  std::random_device source;
  return static_cast<std::int64_t>(source());
}

nccl::Result<std::vector<Words>> tell(const Meeting& with, const Status& status,
                                      const Place& place = {}, std::size_t bytes = 0) {
  const Words mine{static_cast<std::int64_t>(status.code()),
                   place.round,
                   static_cast<std::int64_t>(bytes),
                   place.offset,
                   place.nbytes,
                   place.dtype,
                   any_number()};
  Session& session = *with.session;
  return session.windows()->exchange(mine, handle_of(session.stream()), with.deadline);
}

// Tells all ranks, and raises what is wrong on any of them.
std::vector<Words> agree(const Meeting& with, const Status& status,
                         const Place& place = {}, std::size_t bytes = 0) {
  auto all = tell(with, status, place, bytes);
  raise_or_end(with, all.status());
  raise_ours(status);
  for (std::size_t rank = 0; rank < all.value().size(); ++rank) {
    const auto code = static_cast<Code>(all.value()[rank][0]);
    if (code == Code::kOk) continue;
    raise_ours({code, "a window cannot be made: rank " + std::to_string(rank) +
                          " cannot take part, and says why"});
  }
  return all.take();
}

// If all ranks were in the call that failed here, they hear it now, and the group goes
// on. If not, nothing brings them back.
[[noreturn]] void fail_round(const Meeting& with, Notice& notice, const Status& added) {
  const std::string rank = "rank " + std::to_string(with.session->rank());
  const Status why{added.code(),
                   "a window cannot be made: " + rank + ": " + added.message()};
  notice.leave(why.message());
  Meeting rest = with;
  rest.deadline = std::min(with.deadline, shm::after(kOthers));
  const Status met = tell(rest, why).status();
  if (met.code() == Code::kTimedOut) {
    end(with, {why.code(), why.message() + "; the other ranks did not come back from "
                                           "this call, so the process group ends"});
  }
  notice.remove();
  raise_or_end(with, met);
  raise_ours(why);
  throw StatusError(why);
}

// The next round of NCCL.
void add_round(const Meeting& with, const std::string& key, void* base,
               std::size_t bytes) {
  Notice notice(with.store, key);
  bool given_up = false;
  const Status added =
      with.session->windows()->add(base, bytes, with.deadline, [&]() -> Status {
        Status why = notice.look();
        given_up = !why.ok();
        return why;
      });
  if (given_up) {
    end(with, {added.code(), added.message() + "; rank " +
                                 std::to_string(with.session->rank()) +
                                 " waits for it in NCCL, so the process group ends"});
  }
  if (added.code() == Code::kTimedOut) raise_or_end(with, added);
  if (!added.ok()) fail_round(with, notice, added);
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

// The same on all ranks, for all see the same sizes.
void check_sizes(const Session& session, const std::vector<Words>& all,
                 std::int64_t largest) {
  constexpr int kAnySizesFrom = 23007;
  const nccl::Library& library = session.windows()->library();
  if (library.version() >= kAnySizesFrom) return;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank][1] != kMissing || all[rank][2] == largest) continue;
    throw StatusError(
        {Code::kUnsupported,
         "a window cannot be made: NCCL " + library.version_text() +
             " wants memory of one size on all ranks, and rank " +
             std::to_string(rank) + " brings " + std::to_string(all[rank][2]) +
             " bytes where another one brings " + std::to_string(largest) +
             "; NCCL 2.30.7 and newer take any"});
  }
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
  check_sizes(*with.session, all, largest);
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
  // Before: it must not be freed while a call that failed goes on.
  if (brings) remember(found.allocation, with.session->windows());
  add_round(with, "weightsync-nccl2/window/" + std::to_string(all[0][6]), base, bytes);
  for (Place& each : places) {
    if (each.round == kMissing) each.round = number;
  }
  agree(with, reachable(*with.session, places));
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
