#include "recorder/recorder.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace weightsync::recorder {
namespace {

using shm::MutexLock;

std::int64_t now_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

bool is_over(State state) {
  return state == State::kCompleted || state == State::kFailed;
}

// Which ring; it is the lowest bit of a ticket.
std::size_t ring_of(Kind kind) {
  return kind == Kind::kCollective || kind == Kind::kPointToPoint ? 0 : 1;
}

}  // namespace

Recorder::Recorder(std::size_t capacity) : capacity_(capacity) {
  for (Ring& ring : rings_) ring.places.resize(capacity);
}

GroupPointer Recorder::add_group(std::string name, std::string description,
                                 std::vector<std::int64_t> ranks, int rank) {
  auto group = std::make_shared<Group>();
  group->name = std::move(name);
  group->description = std::move(description);
  group->ranks = std::move(ranks);
  group->rank = rank;
  const MutexLock lock(mu_);
  group->id = next_group_++;
  const auto is_gone = [](const std::weak_ptr<Group>& each) { return each.expired(); };
  groups_.erase(std::remove_if(groups_.begin(), groups_.end(), is_gone), groups_.end());
  groups_.push_back(group);
  return group;
}

void Recorder::describe_group(const GroupPointer& group, std::string description) {
  const MutexLock lock(mu_);
  group->description.swap(description);
}

Ticket Recorder::record(Operation operation) {
  if (!enabled()) return kNoTicket;
  operation.created_ns = now_ns();
  // Takes the place of the oldest, which goes when the lock is given back.
  const MutexLock lock(mu_);
  const std::size_t which = ring_of(operation.kind);
  Ring& ring = rings_[which];
  operation.id = ring.next++;
  const Ticket ticket = 2 * operation.id + which;
  if (operation.kind == Kind::kCollective) {
    Group& group = *operation.group;
    group.enqueued = std::max(group.enqueued, operation.collective);
  }
  std::swap(ring.places[ticket / 2 % capacity_], operation);
  return ticket;
}

Operation* Recorder::find(Ticket ticket) {
  if (ticket == kNoTicket || !enabled()) return nullptr;
  Operation& found = rings_[ticket % 2].places[ticket / 2 % capacity_];
  return found.id == ticket / 2 ? &found : nullptr;
}

void Recorder::start(Ticket ticket) {
  if (ticket == kNoTicket) return;
  const std::int64_t now = now_ns();
  const MutexLock lock(mu_);
  Operation* const found = find(ticket);
  if (found == nullptr || found->state != State::kScheduled) return;
  found->state = State::kStarted;
  found->started_ns = now;
}

void Recorder::finish(Ticket ticket, State state) {
  if (ticket == kNoTicket) return;
  const std::int64_t now = now_ns();
  const MutexLock lock(mu_);
  Operation* const found = find(ticket);
  if (found == nullptr || is_over(found->state)) return;
  found->state = state;
  found->finished_ns = now;
  if (found->kind == Kind::kCollective && state == State::kCompleted) {
    Group& group = *found->group;
    group.completed = std::max(group.completed, found->collective);
  }
}

std::vector<Operation> Recorder::Ring::in_order() const {
  const std::uint64_t kept = std::min<std::uint64_t>(next, places.size());
  std::vector<Operation> all;
  all.reserve(kept);
  for (std::uint64_t each = next - kept; each < next; ++each) {
    all.push_back(places[each % places.size()]);
  }
  return all;
}

Snapshot Recorder::snapshot() const {
  Snapshot taken;
  taken.capacity = capacity_;
  std::vector<GroupPointer> alive;  // outlives the lock: see Operation::group
  const MutexLock lock(mu_);
  taken.exchanges = rings_[0].in_order();
  taken.others = rings_[1].in_order();
  for (const std::weak_ptr<Group>& each : groups_) {
    if (GroupPointer group = each.lock()) {
      taken.groups.push_back(*group);
      alive.push_back(std::move(group));
    }
  }
  return taken;
}

}  // namespace weightsync::recorder
