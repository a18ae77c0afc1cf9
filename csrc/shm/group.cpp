#include "group.h"

#include <algorithm>
#include <map>
#include <utility>

namespace weightsync::shm {
namespace {

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

std::string Group::late(const char* what, const std::vector<int>& ranks) {
  return std::string(what) + " timed out: " + listed(ranks) + " did not come";
}

void Group::tell_left() {
  for (const auto& peer : peers_) {
    peer->control().inbox[rank_].left.store(digest_, std::memory_order_release);
    peer->control().doorbell.ring();
  }
}

void Group::tell_all(Counter value, std::uint64_t number) {
  for (int peer = 0; peer < size(); ++peer) {
    (mine_at(peer).*value).store(number, std::memory_order_release);
    peers_[static_cast<std::size_t>(peer)]->control().doorbell.ring();
  }
}

bool Group::is_gone(int peer) const {
  return peers_[static_cast<std::size_t>(peer)]->dead ||
         control().inbox[peer].left.load(std::memory_order_acquire) == digest_;
}

std::string Group::why_gone(int peer) const {
  const bool left =
      control().inbox[peer].left.load(std::memory_order_acquire) == digest_;
  return "rank " + std::to_string(peer) + " (process " +
         std::to_string(peers_[static_cast<std::size_t>(peer)]->pid) + ")" +
         (left ? " left the group" : " died");
}

Status Group::check_peer(int peer) const {
  if (peer < 0 || peer >= size()) {
    return {Code::kInvalid, "no rank " + std::to_string(peer) + " in a group of " +
                                std::to_string(size())};
  }
  if (Status open = closed(); !open.ok()) return open;
  if (is_gone(peer)) return {Code::kPeer, why_gone(peer)};
  return {};
}

Status Group::signal(int peer, std::uint64_t count) {
  if (Status reachable = check_peer(peer); !reachable.ok()) return reachable;
  mine_at(peer).signals.fetch_add(count, std::memory_order_release);
  peers_[static_cast<std::size_t>(peer)]->control().doorbell.ring();
  return {};
}

std::uint64_t Group::arrived(int peer) const {
  return control().inbox[peer].signals.load(std::memory_order_acquire) -
         taken_[static_cast<std::size_t>(peer)];
}

std::uint64_t Group::available(int peer) {
  const MutexLock lock(signals_mu_);
  return arrived(peer);
}

std::shared_ptr<Wait> Group::signals(const std::vector<Expect>& expected,
                                     Deadline deadline) {
  std::map<int, std::uint64_t> counts;
  for (const Expect& expect : expected) counts[expect.peer] += expect.count;
  std::vector<Expect> each;
  each.reserve(counts.size());
  for (const auto& [peer, count] : counts) each.push_back({peer, count});
  auto self = shared_from_this();
  return std::make_shared<Wait>([self, each] { return self->take(each); },
                                [self, each] { return self->lacking(each); }, deadline);
}

std::optional<Status> Group::take(const std::vector<Expect>& expected) {
  if (Status open = closed(); !open.ok()) return open;
  std::optional<int> lost;
  bool whole = true;
  const MutexLock lock(signals_mu_);
  for (const auto& [peer, count] : expected) {
    if (peer < 0 || peer >= size()) return check_peer(peer);
    // Looked up before the counter: what a peer sent before it died still counts.
    const bool gone = is_gone(peer);
    if (arrived(peer) >= count) continue;
    whole = false;
    if (gone && !lost) lost = peer;
  }
  if (lost) return Status(Code::kPeer, "waiting for signals: " + why_gone(*lost));
  if (!whole) return std::nullopt;
  for (const auto& [peer, count] : expected) {
    taken_[static_cast<std::size_t>(peer)] += count;
  }
  return Status();
}

std::string Group::lacking(const std::vector<Expect>& expected) {
  std::string text = "timed out waiting for signals:";
  const MutexLock lock(signals_mu_);
  for (const auto& [peer, count] : expected) {
    const std::uint64_t there = arrived(peer);
    if (there >= count) continue;
    text += " " + std::to_string(count - there) + " of " + std::to_string(count) +
            " from rank " + std::to_string(peer) + ";";
  }
  text.pop_back();
  return text;
}

std::vector<int> Group::behind(Counter value, std::uint64_t target) const {
  std::vector<int> ranks;
  for (int peer = 0; peer < size(); ++peer) {
    const Inbox& inbox = control().inbox[peer];
    if ((inbox.*value).load(std::memory_order_acquire) < target) ranks.push_back(peer);
  }
  return ranks;
}

std::optional<Status> Group::all_came(const std::function<std::vector<int>()>& others,
                                      const char* what) const {
  if (Status open = closed(); !open.ok()) return open;
  // Looked up before the others: what a peer did before it left still counts.
  std::vector<int> gone;
  for (int peer = 0; peer < size(); ++peer) {
    if (is_gone(peer)) gone.push_back(peer);
  }
  const std::vector<int> ranks = others();
  if (ranks.empty()) return Status();
  for (const int rank : ranks) {
    if (std::binary_search(gone.begin(), gone.end(), rank)) {
      return Status(Code::kPeer, std::string(what) + ": " + why_gone(rank));
    }
  }
  return std::nullopt;
}

std::shared_ptr<Wait> Group::all_reach(Counter value, std::uint64_t target,
                                       const char* what, Deadline deadline) {
  auto self = shared_from_this();
  const auto others = [self, value, target] { return self->behind(value, target); };
  return std::make_shared<Wait>(
      [self, others, what] { return self->all_came(others, what); },
      [others, what] { return late(what, others()); }, deadline);
}

std::shared_ptr<Wait> Group::barrier(Deadline deadline) {
  const MutexLock lock(collective_mu_);
  tell_all(&Inbox::barriers, ++barriers_);
  return all_reach(&Inbox::barriers, barriers_, "barrier", deadline);
}

Result<std::vector<WindowEntry>> Group::exchange(const WindowEntry& mine,
                                                 Deadline deadline) {
  const MutexLock lock(collective_mu_);
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

Status Group::start(const std::shared_ptr<Wait>& wait) {
  return wait->poll() ? Status() : waiter_.add(wait, shared_from_this());
}

Status Group::closed() const {
  if (!closed_) return {};
  const MutexLock lock(state_mu_);
  return {Code::kClosed, why_};
}

void Group::close(const std::string& why) {
  if (!origin_.is_here()) return;
  {
    const MutexLock lock(state_mu_);
    if (closed_) return;
    why_ = why;
    closed_ = true;
  }
  wake();
}

void Group::leave(const std::string& why) {
  if (!origin_.is_here()) return;
  close(why);
  bool published = false;
  {
    const MutexLock lock(state_mu_);
    if (left_) return;
    left_ = true;
    published = published_;
  }
  if (published) {
    tell_left();
    monitor_.stop();
  }
  waiter_.stop();
}

}  // namespace weightsync::shm
