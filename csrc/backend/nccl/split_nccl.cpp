// Groups that are made of a part of another group's ranks: split and shrink.
//
// Where the group has its communicator, that of the part is made from it, and all of
// its ranks take part, or for a shrink those that stay. Where it has none yet, the part
// meets in its own store when it is first used.
#include <c10/core/DeviceGuard.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "backend/nccl/process_group_nccl.h"
#include "backend/nccl/raising.h"

namespace weightsync {
namespace {

using shm::Code;
using shm::Deadline;

constexpr int kFlags = kNcclShrinkDefault | kNcclShrinkAbort;

c10::intrusive_ptr<OptionsNccl> copied(const c10d::Backend::Options& options) {
  return c10::static_intrusive_pointer_cast<OptionsNccl>(options.clone());
}

c10::intrusive_ptr<OptionsNccl> options_of_part(
    const c10::intrusive_ptr<c10d::Backend::Options>& given, const OptionsNccl& parent,
    const char* call) {
  if (!given) return copied(parent);
  const auto ours = c10::dynamic_intrusive_pointer_cast<OptionsNccl>(given);
  TORCH_CHECK_TYPE(ours, call,
                   ": expected a weightsync.backend.NcclOptions, found options of ",
                   given->backend);
  return copied(*ours);
}

template <class Rank>
void check_ranks(const std::vector<Rank>& ranks, int size, const char* call) {
  TORCH_CHECK_VALUE(!ranks.empty(), call, ": expected ranks, found none");
  std::unordered_set<Rank> seen;
  for (const Rank rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size, call, ": rank ", rank,
                      " is not one of this group of ", size);
    TORCH_CHECK_VALUE(seen.insert(rank).second, call, ": rank ", rank, " comes twice");
  }
}

}  // namespace

std::shared_ptr<Session> ProcessGroupNccl::session_if_any() const {
  const std::lock_guard<std::mutex> lock(mu_);
  raise(ended_);
  if (!session_ && elastic_) raise(not_formed());
  return session_;
}

std::vector<std::uint64_t> ProcessGroupNccl::global_ranks(
    const std::vector<int>& ranks) const {
  const auto& mine = options_->global_ranks_in_group;
  std::vector<std::uint64_t> found;
  for (const int rank : ranks) {
    const auto index = static_cast<std::size_t>(rank);
    found.push_back(index < mine.size() ? mine[index] : index);
  }
  return found;
}

c10::intrusive_ptr<ProcessGroupNccl> ProcessGroupNccl::part(
    const c10::intrusive_ptr<c10d::Store>& store, int rank,
    const std::vector<int>& ranks, const c10::intrusive_ptr<OptionsNccl>& options,
    nccl::Communicator::Pointer communicator) const {
  options->global_ranks_in_group = global_ranks(ranks);
  options->enable_reconfigure = false;  // it is formed
  auto made = c10::make_intrusive<ProcessGroupNccl>(
      store, rank, static_cast<int>(ranks.size()), options);
  if (communicator) {
    const c10::Device device(c10::kCUDA,
                             static_cast<c10::DeviceIndex>(communicator->device()));
    const c10::DeviceGuard on(device);
    made->session_ = std::make_shared<Session>(std::move(communicator), device,
                                               options->is_high_priority_stream);
    made->watchdog_->watch(made->session_);
  }
  return made;
}

nccl::Communicator::Pointer ProcessGroupNccl::made_from(
    const std::shared_ptr<Session>& session,
    nccl::Result<nccl::Communicator::Pointer> made) {
  // It is stuck in NCCL: an abort is what releases it.
  if (made.status().code() == Code::kTimedOut) {
    watchdog_->fail(
        session,
        {Code::kTimedOut, made.status().message() +
                              "; do all ranks of the group that is split take part?"});
  }
  raise(made.status());
  return made.take();
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNccl::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& opts) {
  const auto options = options_of_part(opts, *options_, "split");
  check_ranks(ranks, size_, "split");
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  const auto session = session_if_any();
  if (mine == ranks.end()) {
    if (session) split_nothing();
    return nullptr;
  }
  const int rank = static_cast<int>(mine - ranks.begin());
  nccl::Communicator::Pointer communicator;
  if (session) {
    session->check();
    // Parts that are made at once have no rank in common: the least one names each.
    const int color = *std::min_element(ranks.begin(), ranks.end());
    const nccl::Communicator::Place place{rank, static_cast<int>(ranks.size()),
                                          session->device().index()};
    Recording::Open recorded({recording_.begin_membership("split", options->timeout)});
    communicator = made_from(
        session, session->communicator().split(color, rank, place, options->config,
                                               shm::after(options->timeout)));
    Recording::finish(recorded.keep(), true);
  }
  return part(store, rank, ranks, options, std::move(communicator));
}

void ProcessGroupNccl::split_nothing() {
  const auto session = session_if_any();
  if (!session) return;
  session->check();
  const auto timeout = timeout_or_default(kNoTimeout);
  Recording::Open recorded({recording_.begin_membership("split", timeout)});
  made_from(session,
            session->communicator().split(kNcclSplitNoColor, rank_, {},
                                          options_->config, shm::after(timeout)));
  Recording::finish(recorded.keep(), true);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNccl::shrink(
    const std::vector<std::int64_t>& ranks_to_exclude, int shrink_flags,
    const c10::intrusive_ptr<Options>& opts_override) {
  const auto options = options_of_part(opts_override, *options_, "shrink");
  check_ranks(ranks_to_exclude, size_, "shrink");
  TORCH_CHECK_VALUE((shrink_flags & ~kFlags) == 0, "shrink: unknown flags ",
                    shrink_flags);
  std::vector<int> excluded(ranks_to_exclude.begin(), ranks_to_exclude.end());
  std::sort(excluded.begin(), excluded.end());
  std::vector<int> rest;
  std::string name;
  for (int rank = 0; rank < size_; ++rank) {
    if (!std::binary_search(excluded.begin(), excluded.end(), rank)) {
      rest.push_back(rank);
      name += std::to_string(rank) + ",";
    }
  }
  const auto mine = std::find(rest.begin(), rest.end(), rank_);
  TORCH_CHECK_VALUE(mine != rest.end(), "shrink: rank ", rank_,
                    " is to be excluded, and must not call this");
  const int rank = static_cast<int>(mine - rest.begin());
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>("weightsync-nccl2/shrunk/" + name, store_);
  const auto session = session_if_any();
  if (!session) return part(store, rank, rest, options, nullptr);

  const bool abort = (shrink_flags & kNcclShrinkAbort) != 0;
  const Deadline deadline = shm::after(options->timeout);
  session->check();
  if (abort) {
    watchdog_->give_up(session, {Code::kClosed,
                                 "the process group was shrunk, and gave up what "
                                 "was pending"});
  } else if (!watchdog_->drain(*session, deadline)) {
    raise({Code::kTimedOut,
           "shrink: operations are pending; SHRINK_ABORT gives them up"});
  }
  const nccl::Communicator::Place place{rank, static_cast<int>(rest.size()),
                                        session->device().index()};
  Recording::Open recorded({recording_.begin_membership("shrink", options->timeout)});
  auto communicator =
      made_from(session, session->communicator().shrink(excluded, abort, place,
                                                        options->config, deadline));
  Recording::finish(recorded.keep(), true);
  // Its destruction would wait for those that are excluded.
  shrunk_ = true;
  return part(store, rank, rest, options, std::move(communicator));
}

}  // namespace weightsync
