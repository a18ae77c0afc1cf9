// Children of a communicator that are made of its own ranks: split and shrink.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "emulator/core.h"
#include "emulator/nccl/bootstrap.h"
#include "emulator/nccl/group.h"
#include "emulator/nccl/hash.h"
#include "emulator/nccl/lifecycle.h"

namespace weightsync::emulator::nccl {
namespace {

using SegmentPtr = std::shared_ptr<shm::Segment>;

// What a rank of the parent tells the others about its part in a child.
struct Entry {
  std::int32_t color = kNcclSplitNoColor;
  std::int32_t key = 0;
  std::int32_t device = -1;
  std::int32_t version = 0;
  std::int64_t pid = 0;
  shm::Locator control;
};

Bytes bytes_of(const Entry& entry) {
  Bytes bytes(sizeof entry);
  std::memcpy(bytes.data(), &entry, sizeof entry);
  return bytes;
}

// A child in the making, on one rank.
class Birth {
 public:
  // `key` is the same on all `ranks` (of the parent) and used once.
  Birth(CommunicatorPtr parent, std::vector<int> ranks, std::uint64_t key,
        const char* what)
      : parent_(std::move(parent)), ranks_(std::move(ranks)), key_(key), what_(what) {}

  // All ranks meet; the child is null for a rank without color.
  Outcome run(int color, int order, const Config& config, bool share,
              CommunicatorPtr& child) {
    if (Outcome met = meet(color, order); !met.ok()) return met;
    Outcome made = make(color, config, share, child);
    // Whoever failed tells it: nobody may wait for a child that is not there.
    if (Outcome all = agree(made.ok()); !all.ok() && made.ok()) made = std::move(all);
    if (!made.ok() && child) std::exchange(child, nullptr)->retire();
    return made;
  }

 private:
  Outcome meet(int color, int order) {
    Entry mine;
    mine.color = color;
    mine.key = order;
    mine.device = physical_device(parent_->device());
    mine.pid = ::getpid();
    if (color != kNcclSplitNoColor) {
      shm::Result<SegmentPtr> control = make_control();
      if (!control.ok()) return {ncclSystemError, control.status().message()};
      control_ = control.take();
      mine.control = control_->locator();
    }
    std::vector<Bytes> all;
    if (Outcome met = parent_->meet(key_, ranks_, what_, bytes_of(mine), all);
        !met.ok()) {
      return met;
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      Entry entry;
      if (all[i].size() != sizeof entry) return {ncclInternalError, "a torn meeting"};
      std::memcpy(&entry, all[i].data(), sizeof entry);
      if (entry.color == color) relatives_.emplace_back(entry.key, ranks_[i], entry);
    }
    return {};
  }

  Outcome make(int color, const Config& config, bool share, CommunicatorPtr& child) {
    if (color == kNcclSplitNoColor) return {};
    std::sort(relatives_.begin(), relatives_.end(), [](const auto& a, const auto& b) {
      return std::tie(a.order, a.rank) < std::tie(b.order, b.rank);
    });
    Membership members;
    members.identity =
        hash({key_, static_cast<std::uint64_t>(static_cast<std::int64_t>(color))});
    std::vector<shm::Locator> locators;
    int rank = -1;
    for (const Relative& relative : relatives_) {
      if (relative.rank == parent_->rank()) rank = static_cast<int>(locators.size());
      members.devices.push_back(relative.entry.device);
      members.processes.push_back(relative.entry.pid);
      locators.push_back(relative.entry.control);
    }
    std::vector<SegmentPtr> controls;
    if (Outcome opened = open_controls(locators, rank, control_, controls);
        !opened.ok()) {
      return opened;
    }
    child = Communicator::create(rank, static_cast<int>(locators.size()),
                                 parent_->device(), config);
    child->connect(std::move(members), std::move(controls),
                   share ? parent_->share_serial() : std::make_shared<Serial>());
    return {};
  }

  Outcome agree(bool made) {
    std::vector<Bytes> all;
    const Bytes mine{made ? std::byte{1} : std::byte{0}};
    const std::uint64_t key = hash({key_, kConnectedKey});
    if (Outcome met = parent_->meet(key, ranks_, what_, mine, all); !met.ok())
      return met;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (all[i].size() == 1 && all[i][0] == std::byte{1}) continue;
      return {ncclRemoteError,
              "rank " + std::to_string(ranks_[i]) + " could not make the child"};
    }
    return {};
  }

  struct Relative {
    Relative(int order_, int rank_, const Entry& entry_)
        : order(order_), rank(rank_), entry(entry_) {}
    int order;
    int rank;  // in the parent
    Entry entry;
  };

  const CommunicatorPtr parent_;
  const std::vector<int> ranks_;
  const std::uint64_t key_;
  const char* const what_;
  SegmentPtr control_;
  std::vector<Relative> relatives_;
};

void give(ncclComm_t* newcomm, const CommunicatorPtr& child) {
  const ncclComm_t handle = child ? child->handle() : nullptr;
  __atomic_store_n(newcomm, handle, __ATOMIC_RELEASE);
}

// How often each list of ranks was excluded: the survivors alone count it.
struct Shrinks {
  std::mutex mutex;
  std::map<std::uint64_t, std::uint64_t> count;
};

std::vector<int> survivors_of(const Communicator& parent, const int* begin,
                              const int* end) {
  std::vector<int> ranks;
  for (int rank = 0; rank < parent.size(); ++rank) {
    if (!std::binary_search(begin, end, rank)) ranks.push_back(rank);
  }
  return ranks;
}

std::uint64_t shrink_key(Communicator& parent, const std::vector<int>& survivors) {
  std::vector<std::uint64_t> values{parent.members().identity, kShrinkKey};
  values.insert(values.end(), survivors.begin(), survivors.end());
  const std::uint64_t list = hash(values);
  Shrinks& shrinks = parent.part<Shrinks>();
  const std::lock_guard lock(shrinks.mutex);
  return hash({list, shrinks.count[list]++});
}

}  // namespace

Outcome split(const CommunicatorPtr& parent, int color, int key, ncclComm_t* newcomm,
              const ncclConfig_t* config) {
  if (newcomm == nullptr) return invalid_argument("the new communicator is NULL");
  if (Outcome ready = parent->ready(); !ready.ok()) return ready;
  *newcomm = nullptr;
  if (color < 0 && color != kNcclSplitNoColor) {
    return invalid_argument("color " + std::to_string(color));
  }
  Config parsed;
  if (Outcome found = parse_config(config, parent->config(), parsed); !found.ok()) {
    return found;
  }
  const std::uint64_t meeting =
      hash({parent->members().identity, kSplitKey, parent->next_child()});
  HostStep step;
  step.what = "ncclCommSplit";
  step.run = [=]() -> Outcome {
    Outcome fault = meet_fault(OperationKind::kSplit, *parent);
    if (!fault.ok()) return fault;
    const bool share = parent->config().split_share && !parent->revoked();
    CommunicatorPtr child;
    Outcome born = Birth(parent, parent->all_ranks(), meeting, "ncclCommSplit")
                       .run(color, key, parsed, share, child);
    give(newcomm, child);
    return born;
  };
  return add_step(parent, std::move(step));
}

Outcome shrink(const CommunicatorPtr& parent, int* excluded, int excluded_count,
               ncclComm_t* newcomm, const ncclConfig_t* config, int flags) {
  if (newcomm == nullptr) return invalid_argument("the new communicator is NULL");
  if (Outcome ready = parent->ready(); !ready.ok()) return ready;
  *newcomm = nullptr;
  if (excluded == nullptr || excluded_count <= 0) {
    return invalid_argument("the list of excluded ranks is empty");
  }
  std::sort(excluded, excluded + excluded_count);  // the caller's own, as NCCL does
  if (std::binary_search(excluded, excluded + excluded_count, parent->rank())) {
    return invalid_argument(parent->describe() + " excludes itself");
  }
  Config parsed;
  if (Outcome found = parse_config(config, parent->config(), parsed); !found.ok()) {
    return found;
  }
  const bool aborts = (flags & kNcclShrinkAbort) != 0;
  if (aborts) {
    parent->raise_abort();
    parent->synchronize();
    parent->lower_abort();
  }
  const std::vector<int> ranks =
      survivors_of(*parent, excluded, excluded + excluded_count);
  const std::uint64_t meeting = shrink_key(*parent, ranks);
  HostStep step;
  step.what = "ncclCommShrink";
  step.run = [=]() -> Outcome {
    Outcome fault = meet_fault(OperationKind::kShrink, *parent);
    if (!fault.ok()) return fault;
    const bool share = parent->config().shrink_share && !parent->revoked() && !aborts;
    CommunicatorPtr child;
    Outcome born = Birth(parent, ranks, meeting, "ncclCommShrink")
                       .run(0, parent->rank(), parsed, share, child);
    give(newcomm, child);
    return born;
  };
  return add_step(parent, std::move(step));
}

}  // namespace weightsync::emulator::nccl
