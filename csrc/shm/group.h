// Group: one configuration of ranks that put, signal and wait among each other.
//
// Created with a fresh control segment, whose handle the caller passes to the peers by
// any means; join() forms the group once. It ends by leave() and is never formed again:
// a process group makes a new Group for each reconfiguration, so members of an old one
// cannot reach a new one.
//
// Signals are counted per pair of ranks, over all windows of the group, as in NCCL.
// Any thread may call anything after join(), and close() and leave() during it. Waits
// that a peer's death or leave() makes hopeless end with an error; what arrived before
// a death still counts. A forked child has no part in its parent's group: close() and
// leave() do nothing there, whatever else is called.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "annotations.h"
#include "control.h"
#include "monitor.h"
#include "segment.h"
#include "status.h"
#include "wait.h"

namespace weightsync::shm {

// A number of signals expected from one peer.
struct Expect {
  int peer;
  std::uint64_t count;
};

class Group : public std::enable_shared_from_this<Group> {
 public:
  static Result<std::shared_ptr<Group>> create();
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // "shm:<pid>:<fd>:<inode>". Valid for one join() by each peer.
  std::string handle() const;

  // Forms the group of these handles, ranks by position; once. `digest` names the
  // configuration; peers that were given another one are an error here, not a hang.
  Status join(const std::vector<std::string>& handles, std::uint64_t digest,
              Deadline deadline);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }

  // Raises this rank's counter at `peer` by `count`; everything stored before is
  // visible there first.
  Status signal(int peer, std::uint64_t count);

  // Takes all these signals together, once all are there; none before. A peer that is
  // named twice is expected to send both counts.
  std::shared_ptr<Wait> signals(const std::vector<Expect>& expected, Deadline deadline);

  // Signals of `peer` that have arrived and are not taken.
  std::uint64_t available(int peer);

  // Enters the next barrier; the wait ends when every rank has.
  std::shared_ptr<Wait> barrier(Deadline deadline);

  // Tells every rank about this rank's window, and learns theirs. Collective.
  Result<std::vector<WindowEntry>> exchange(const WindowEntry& mine, Deadline deadline);

  // Whether `peer` is a rank of this group that can still be reached.
  Status check_peer(int peer) const;

  // Wakes whoever waits in this process, to look again.
  void wake() { control().doorbell.ring(); }

  // Runs a wait on the calling thread, or on the waiter thread.
  Status block(Wait& wait) { return block_on(wait, control().doorbell); }
  Status start(const std::shared_ptr<Wait>& wait);

  // Tells the peers that this rank is gone and ends every wait here with kClosed.
  // Idempotent, does not wait for any peer. Call it without the GIL.
  void leave(const std::string& why);

  // Only ends every wait here, a join() under way included; leave() is still to come.
  void close(const std::string& why);

  Status closed() const;

 private:
  struct Peer {
    std::int64_t pid = 0;
    std::shared_ptr<Segment> segment;
    std::atomic<bool> dead{false};

    Control& control() const { return *reinterpret_cast<Control*>(segment->data()); }
  };

  explicit Group(std::shared_ptr<Segment> segment)
      : segment_(std::move(segment)), waiter_(control().doorbell) {}

  Control& control() const { return *reinterpret_cast<Control*>(segment_->data()); }
  Inbox& mine_at(int peer) const {
    return peers_[static_cast<std::size_t>(peer)]->control().inbox[rank_];
  }
  using Counter = std::atomic<std::uint64_t> Inbox::*;

  // Maps the peers' segments. Goes on after an error, so that leave() tells all it can;
  // the positions in peers_ mean nothing then.
  Status open_peers(const std::vector<std::string>& handles);
  Result<std::unique_ptr<Peer>> open_peer(int peer, const std::string& handle);
  // From here on leave() knows the peers. Passes `opened` on, or says that close() or
  // leave() came first.
  Status publish(Status opened);
  void tell_left();
  // The digest of an attempt to form a group that failed before this one, and left its
  // traces in a segment whose owner had not joined; else 0.
  std::uint64_t ended_attempt(const Inbox& inbox) const;
  // Announces the configuration; kInvalid where a peer wrote another one.
  Status announce();
  // The same of what the peers announce here. `ended` does not count.
  Status joined_alike(const std::vector<std::uint64_t>& ended) const;
  std::vector<int> not_joined() const;

  // Finishes when `value` of every other rank has reached `target`.
  std::shared_ptr<Wait> all_reach(Counter value, std::uint64_t target, const char* what,
                                  Deadline deadline);
  // Finished when there are no `others`, or one of them is gone.
  std::optional<Status> all_came(const std::function<std::vector<int>()>& others,
                                 const char* what) const;
  std::vector<int> behind(Counter value, std::uint64_t target) const;
  // The message of a collective that some ranks did not enter in time.
  static std::string late(const char* what, const std::vector<int>& ranks);
  void tell_all(Counter value, std::uint64_t number);

  std::optional<Status> take(const std::vector<Expect>& expected);
  std::string lacking(const std::vector<Expect>& expected);
  std::uint64_t arrived(int peer) const WEIGHTSYNC_REQUIRES(signals_mu_);

  bool is_gone(int peer) const;
  std::string why_gone(int peer) const;

  // Constant after construction.
  const Origin origin_;
  const std::shared_ptr<Segment> segment_;

  // Constant after join().
  int rank_ = -1;
  std::uint64_t digest_ = 0;
  std::vector<std::unique_ptr<Peer>> peers_;

  // Own synchronisation.
  Monitor monitor_;
  Waiter waiter_;
  std::atomic<bool> closed_{false};

  Mutex collective_mu_;  // one collective at a time, in program order
  std::uint64_t barriers_ WEIGHTSYNC_GUARDED_BY(collective_mu_) = 0;
  std::uint64_t windows_ WEIGHTSYNC_GUARDED_BY(collective_mu_) = 0;

  Mutex signals_mu_;
  std::vector<std::uint64_t> taken_ WEIGHTSYNC_GUARDED_BY(signals_mu_);

  mutable Mutex state_mu_;
  std::string why_ WEIGHTSYNC_GUARDED_BY(state_mu_);  // it was closed
  bool left_ WEIGHTSYNC_GUARDED_BY(state_mu_) = false;
  bool published_ WEIGHTSYNC_GUARDED_BY(state_mu_) = false;
};

}  // namespace weightsync::shm
