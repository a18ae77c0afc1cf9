#include "group.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>

namespace weightsync::shm {
namespace {

std::optional<Locator> parse(const std::string& handle) {
  long long pid = 0;
  long long fd = 0;
  unsigned long long inode = 0;
  int used = 0;
  const int fields =
      std::sscanf(handle.c_str(), "shm:%lld:%lld:%llu%n", &pid, &fd, &inode, &used);
  if (fields != 3 || static_cast<std::size_t>(used) != handle.size()) {
    return std::nullopt;
  }
  return Locator{pid, fd, inode, sizeof(Control)};
}

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

Result<std::shared_ptr<Group>> Group::create() {
  Result<std::shared_ptr<Segment>> segment =
      Segment::create(sizeof(Control), Populate::kNo);
  if (!segment.ok()) return segment.status();
  auto group = std::shared_ptr<Group>(new Group(segment.take()));
  group->control().magic = kMagic;
  return group;
}

Group::~Group() { leave("the process group is gone"); }

std::string Group::handle() const {
  const Locator at = segment_->locator();
  return "shm:" + std::to_string(at.pid) + ":" + std::to_string(at.fd) + ":" +
         std::to_string(at.inode);
}

Status Group::open_peers(const std::vector<std::string>& handles) {
  for (std::size_t i = 0; i < handles.size(); ++i) {
    const std::optional<Locator> at = parse(handles[i]);
    if (!at) return {Code::kInvalid, "not a handle of this backend: " + handles[i]};
    auto peer = std::make_unique<Peer>();
    peer->pid = at->pid;
    // Watched before it is opened: the segment then proves that the pid is still its own.
    const int number = static_cast<int>(i);
    if (Status watched = monitor_.watch(number, at->pid); !watched.ok()) return watched;
    if (number == rank_) {
      peer->segment = segment_;
    } else {
      Result<std::shared_ptr<Segment>> opened = Segment::open(*at, Populate::kNo);
      if (!opened.ok()) {
        return {opened.status().code(), "cannot reach rank " + std::to_string(number) +
                                            ": " + opened.status().message()};
      }
      peer->segment = opened.take();
    }
    if (peer->control().magic != kMagic) {
      return {Code::kInvalid, "not a control segment: " + handles[i]};
    }
    peers_.push_back(std::move(peer));
  }
  return {};
}

Status Group::join(const std::vector<std::string>& handles, std::uint64_t digest,
                   Deadline deadline) {
  const auto own = std::find(handles.begin(), handles.end(), handle());
  if (own == handles.end()) {
    return {Code::kInvalid, "the handle of this rank is not among the " +
                                std::to_string(handles.size()) + " handles given"};
  }
  if (handles.size() > kMaxRanks) {
    return {Code::kInvalid, "a group has at most " + std::to_string(kMaxRanks) +
                                " ranks, got " + std::to_string(handles.size())};
  }
  rank_ = static_cast<int>(own - handles.begin());
  if (Status opened = open_peers(handles); !opened.ok()) return opened;
  taken_.assign(handles.size(), 0);
  Status started = monitor_.start([this](int peer) {
    peers_[static_cast<std::size_t>(peer)]->dead = true;
    control().doorbell.ring();
  });
  if (!started.ok()) return started;
  digest |= 1;  // 0 means "not yet"
  tell_all(&Inbox::joined, digest);
  const auto formed = all_reach(&Inbox::joined, 1, "forming the group", deadline);
  if (Status outcome = block(*formed); !outcome.ok()) return outcome;
  return joined_alike(digest);
}

Status Group::joined_alike(std::uint64_t digest) const {
  for (int peer = 0; peer < size(); ++peer) {
    const std::uint64_t theirs =
        control().inbox[peer].joined.load(std::memory_order_acquire);
    if (theirs != digest) {
      return {Code::kInvalid, "rank " + std::to_string(peer) +
                                  " joined with another uuid or list of handles"};
    }
  }
  return {};
}

void Group::tell_all(std::atomic<std::uint64_t> Inbox::* value, std::uint64_t number) {
  for (int peer = 0; peer < size(); ++peer) {
    (mine_at(peer).*value).store(number, std::memory_order_release);
    peers_[static_cast<std::size_t>(peer)]->control().doorbell.ring();
  }
}

std::string Group::gone(int peer) const {
  const Peer& other = *peers_[static_cast<std::size_t>(peer)];
  const std::string who =
      "rank " + std::to_string(peer) + " (process " + std::to_string(other.pid) + ")";
  if (control().inbox[peer].left.load(std::memory_order_acquire) != 0) {
    return who + " left the group";
  }
  return other.dead ? who + " died" : "";
}

Status Group::check_peer(int peer) const {
  if (peer < 0 || peer >= size()) {
    return {Code::kInvalid, "no rank " + std::to_string(peer) + " in a group of " +
                                std::to_string(size())};
  }
  if (Status open = closed(); !open.ok()) return open;
  if (std::string why = gone(peer); !why.empty()) return {Code::kPeer, why};
  return {};
}

Status Group::signal(int peer, std::uint64_t count) {
  if (Status reachable = check_peer(peer); !reachable.ok()) return reachable;
  mine_at(peer).signals.fetch_add(count, std::memory_order_release);
  peers_[static_cast<std::size_t>(peer)]->control().doorbell.ring();
  return {};
}

std::uint64_t Group::available(int peer) {
  const std::lock_guard<std::mutex> lock(signals_mu_);
  const std::uint64_t arrived =
      control().inbox[peer].signals.load(std::memory_order_acquire);
  return arrived - taken_[static_cast<std::size_t>(peer)];
}

std::shared_ptr<Wait> Group::signals(std::vector<Expect> expected, Deadline deadline) {
  auto self = shared_from_this();
  auto lacking = [this, expected](int peer, std::uint64_t count) {
    const std::uint64_t arrived =
        control().inbox[peer].signals.load(std::memory_order_acquire);
    const std::uint64_t rest = arrived - taken_[static_cast<std::size_t>(peer)];
    return rest < count ? count - rest : 0;
  };
  auto check = [this, self, expected, lacking]() -> std::optional<Status> {
    if (Status open = closed(); !open.ok()) return open;
    std::string failure;
    bool whole = true;
    const std::lock_guard<std::mutex> lock(signals_mu_);
    for (const Expect& expect : expected) {
      // Looked up before the counter: what a peer sent before it died still counts.
      const std::string why = gone(expect.peer);
      if (lacking(expect.peer, expect.count) == 0) continue;
      whole = false;
      if (failure.empty()) failure = why;
    }
    if (whole) {
      for (const Expect& expect : expected) {
        taken_[static_cast<std::size_t>(expect.peer)] += expect.count;
      }
      return Status();
    }
    if (failure.empty()) return std::nullopt;
    return Status(Code::kPeer, "waiting for signals: " + failure);
  };
  auto missing = [this, self, expected, lacking] {
    std::string text = "timed out waiting for signals:";
    const std::lock_guard<std::mutex> lock(signals_mu_);
    for (const Expect& expect : expected) {
      if (const std::uint64_t rest = lacking(expect.peer, expect.count)) {
        text += " " + std::to_string(rest) + " of " + std::to_string(expect.count) +
                " from rank " + std::to_string(expect.peer) + ";";
      }
    }
    text.pop_back();
    return text;
  };
  return std::make_shared<Wait>(check, missing, deadline);
}

std::shared_ptr<Wait> Group::all_reach(std::atomic<std::uint64_t> Inbox::* value,
                                       std::uint64_t target, const char* what,
                                       Deadline deadline) {
  auto self = shared_from_this();
  auto behind = [this, value, target] {
    std::vector<int> ranks;
    for (int peer = 0; peer < size(); ++peer) {
      const Inbox& inbox = control().inbox[peer];
      if ((inbox.*value).load(std::memory_order_acquire) < target) ranks.push_back(peer);
    }
    return ranks;
  };
  auto check = [this, self, behind, what]() -> std::optional<Status> {
    if (Status open = closed(); !open.ok()) return open;
    std::vector<std::string> failures(peers_.size());
    for (int peer = 0; peer < size(); ++peer) {
      failures[static_cast<std::size_t>(peer)] = gone(peer);
    }
    const std::vector<int> ranks = behind();
    if (ranks.empty()) return Status();
    for (const int rank : ranks) {
      const std::string& failure = failures[static_cast<std::size_t>(rank)];
      if (!failure.empty()) {
        return Status(Code::kPeer, std::string(what) + ": " + failure);
      }
    }
    return std::nullopt;
  };
  auto missing = [self, behind, what] {
    return std::string(what) + " timed out: " + listed(behind()) + " did not come";
  };
  return std::make_shared<Wait>(check, missing, deadline);
}

std::shared_ptr<Wait> Group::barrier(Deadline deadline) {
  const std::lock_guard<std::mutex> lock(collective_mu_);
  tell_all(&Inbox::barriers, ++barriers_);
  return all_reach(&Inbox::barriers, barriers_, "barrier", deadline);
}

Result<std::vector<WindowEntry>> Group::exchange(const WindowEntry& mine,
                                                 Deadline deadline) {
  const std::lock_guard<std::mutex> lock(collective_mu_);
  if (Status open = closed(); !open.ok()) return open;
  const std::uint64_t number = ++windows_;
  for (int peer = 0; peer < size(); ++peer) mine_at(peer).window[number % 2] = mine;
  tell_all(&Inbox::windows, number);
  const auto told = all_reach(&Inbox::windows, number, "window registration", deadline);
  if (Status outcome = block(*told); !outcome.ok()) return outcome;
  std::vector<WindowEntry> entries;
  entries.reserve(peers_.size());
  for (int peer = 0; peer < size(); ++peer) {
    entries.push_back(control().inbox[peer].window[number % 2]);
  }
  return entries;
}

void Group::start(const std::shared_ptr<Wait>& wait) {
  if (!wait->poll()) waiter_.add(wait, shared_from_this());
}

Status Group::closed() const {
  if (!closed_) return {};
  const std::lock_guard<std::mutex> lock(why_mu_);
  return {Code::kClosed, why_};
}

void Group::close(const std::string& why) {
  {
    const std::lock_guard<std::mutex> lock(why_mu_);
    if (closed_) return;
    why_ = why;
    closed_ = true;
  }
  wake();
}

void Group::leave(const std::string& why) {
  close(why);
  if (left_.exchange(true)) return;
  if (rank_ >= 0) {
    for (const auto& peer : peers_) {
      peer->control().inbox[rank_].left.store(1, std::memory_order_release);
      peer->control().doorbell.ring();
    }
  }
  waiter_.stop();
  monitor_.stop();
}

}  // namespace weightsync::shm
