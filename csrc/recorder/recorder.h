// Recorder: the last operations of this process, in two rings of fixed size.
//
// One-sided calls and changes of the members have a ring of their own: they are many,
// and torch's analyser knows neither them nor gaps where they were.
//
// Cheap enough to be always on: recording takes a lock for a few stores and a swap, and
// allocates nothing under it. Any thread may call anything, also with the GIL: nothing
// here takes it, and what may take it when it is dropped is dropped without the lock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "recorder/operation.h"
#include "shm/annotations.h"

namespace weightsync::recorder {

// What is told of an operation later; none if it was not recorded.
using Ticket = std::uint64_t;
inline constexpr Ticket kNoTicket = ~Ticket{0};

struct Snapshot {
  // From the oldest to the newest.
  std::vector<Operation> exchanges;  // collectives, sends and receives
  std::vector<Operation> others;
  std::vector<Group> groups;
  std::size_t capacity = 0;
};

class Recorder {
 public:
  // Keeps so many operations of each ring; 0 records nothing.
  explicit Recorder(std::size_t capacity);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  bool enabled() const { return capacity_ > 0; }

  // Its numbers count on while the group or an operation of it is kept.
  GroupPointer add_group(std::string name, std::string description,
                         std::vector<std::int64_t> ranks, int rank);
  void describe_group(const GroupPointer& group, std::string description);

  Ticket record(Operation operation);
  // Nothing happens where the operation is forgotten or was finished before.
  void start(Ticket ticket);
  void finish(Ticket ticket, State state);

  Snapshot snapshot() const;

 private:
  struct Ring {
    std::vector<Operation> places;
    std::uint64_t next = 0;

    std::vector<Operation> in_order() const;
  };

  Operation* find(Ticket ticket) WEIGHTSYNC_REQUIRES(mu_);

  // Constant after construction.
  const std::size_t capacity_;

  mutable shm::Mutex mu_;
  Ring rings_[2] WEIGHTSYNC_GUARDED_BY(mu_);
  std::uint64_t next_group_ WEIGHTSYNC_GUARDED_BY(mu_) = 0;
  std::vector<std::weak_ptr<Group>> groups_ WEIGHTSYNC_GUARDED_BY(mu_);
};

}  // namespace weightsync::recorder
