#include "group.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <utility>

namespace weightsync::shm {
namespace {

constexpr const char* kScheme = "shm";
constexpr const char* kForming = "forming the group";
constexpr const char* kDisagree = "joined with another uuid or list of handles";

// One number of a handle and what follows it; nothing if there is none.
template <class T>
const char* read(const char* from, const char* end, char before, T& number) {
  if (from == nullptr || from == end || *from != before) return nullptr;
  const auto [rest, error] = std::from_chars(from + 1, end, number);
  return error == std::errc() ? rest : nullptr;
}

std::optional<Locator> parse(const std::string& handle) {
  Locator at{0, 0, 0, sizeof(Control)};
  const char* const end = handle.data() + handle.size();
  if (handle.rfind(kScheme, 0) != 0) return std::nullopt;
  const char* rest = handle.data() + std::strlen(kScheme);
  rest = read(rest, end, ':', at.pid);
  rest = read(rest, end, ':', at.fd);
  rest = read(rest, end, ':', at.inode);
  const bool sane = rest == end && at.fd >= 0 && at.pid > 0 &&
                    at.pid <= std::numeric_limits<pid_t>::max();
  return sane ? std::make_optional(at) : std::nullopt;
}

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

// The message of a collective that some ranks did not enter in time.
std::string late(const char* what, const std::vector<int>& ranks) {
  return std::string(what) + " timed out: " + listed(ranks) + " did not come";
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
  return std::string(kScheme) + ":" + std::to_string(at.pid) + ":" +
         std::to_string(at.fd) + ":" + std::to_string(at.inode);
}

Result<std::unique_ptr<Group::Peer>> Group::open_peer(int peer,
                                                      const std::string& handle) {
  const std::optional<Locator> at = parse(handle);
  if (!at) return Status(Code::kInvalid, "not a handle of this backend: " + handle);
  auto opened = std::make_unique<Peer>();
  opened->pid = at->pid;
  // Watched before it is opened: the segment then proves that the pid is still its own.
  if (Status watched = monitor_.watch(peer, at->pid); !watched.ok()) return watched;
  if (peer == rank_) {
    opened->segment = segment_;
    return opened;
  }
  Result<std::shared_ptr<Segment>> segment = Segment::open(*at, Populate::kNo);
  if (!segment.ok()) {
    return Status(segment.status().code(), "cannot reach rank " + std::to_string(peer) +
                                               ": " + segment.status().message());
  }
  opened->segment = segment.take();
  if (opened->control().magic != kMagic) {
    return Status(Code::kInvalid, "not a control segment: " + handle);
  }
  return opened;
}

Status Group::open_peers(const std::vector<std::string>& handles) {
  Status outcome;
  for (std::size_t i = 0; i < handles.size(); ++i) {
    Result<std::unique_ptr<Peer>> opened = open_peer(static_cast<int>(i), handles[i]);
    if (opened.ok()) {
      peers_.push_back(opened.take());
    } else if (outcome.ok()) {
      outcome = opened.status();
    }
  }
  return outcome;
}

Status Group::join(const std::vector<std::string>& handles, std::uint64_t digest,
                   Deadline deadline) {
  if (rank_ >= 0) return {Code::kInvalid, "a group is formed only once"};
  const auto own = std::find(handles.begin(), handles.end(), handle());
  if (own == handles.end()) {
    return {Code::kInvalid, "the handle of this rank is not among the " +
                                std::to_string(handles.size()) + " handles given"};
  }
  if (handles.size() > kMaxRanks) {
    return {Code::kInvalid, "a group has at most " + std::to_string(kMaxRanks) +
                                " ranks, got " + std::to_string(handles.size())};
  }
  if (std::set<std::string>(handles.begin(), handles.end()).size() < handles.size()) {
    return {Code::kInvalid, "a handle is given twice"};
  }
  rank_ = static_cast<int>(own - handles.begin());
  if (Status known = publish(open_peers(handles)); !known.ok()) return known;
  digest = std::max<std::uint64_t>(digest, 1);  // 0 means "not yet"
  if (Status alike = announce(digest); !alike.ok()) return alike;
  const Wait::Check check = [this, digest]() -> std::optional<Status> {
    std::optional<Status> reached = all_reached(&Inbox::joined, 1, kForming);
    // Last, so that nobody's word comes between unseen.
    if (Status alike = joined_alike(digest); !alike.ok()) return alike;
    return reached;
  };
  const auto missing = [this] { return late(kForming, behind(&Inbox::joined, 1)); };
  Wait formed(check, missing, deadline);
  return block(formed);
}

Status Group::publish(Status opened) {
  {
    const MutexLock lock(signals_mu_);
    taken_.assign(peers_.size(), 0);
  }
  bool left = false;
  {
    const MutexLock lock(state_mu_);
    if (closed_) opened = {Code::kClosed, why_};
    if (opened.ok()) {
      opened = monitor_.start([this](int peer) {
        peers_[static_cast<std::size_t>(peer)]->dead = true;
        wake();
      });
    }
    published_ = true;
    left = left_;
  }
  if (left) tell_left();
  return opened;
}

void Group::tell_left() {
  for (const auto& peer : peers_) {
    peer->control().inbox[rank_].left.store(1, std::memory_order_release);
    peer->control().doorbell.ring();
  }
}

Status Group::announce(std::uint64_t digest) {
  Status outcome;
  for (int peer = 0; peer < size(); ++peer) {
    // Who is given the handles in another order may believe to be this very rank. Its
    // word would be lost under ours, so the one who comes second has to notice.
    const std::uint64_t before = mine_at(peer).joined.exchange(digest);
    peers_[static_cast<std::size_t>(peer)]->control().doorbell.ring();
    if (before != 0 && before != digest) outcome = {Code::kInvalid, kDisagree};
  }
  return outcome;
}

Status Group::joined_alike(std::uint64_t digest) const {
  for (int peer = 0; peer < size(); ++peer) {
    const std::uint64_t theirs =
        control().inbox[peer].joined.load(std::memory_order_acquire);
    if (theirs != 0 && theirs != digest) {
      return {Code::kInvalid, "rank " + std::to_string(peer) + ": " + kDisagree};
    }
  }
  return {};
}

void Group::tell_all(Counter value, std::uint64_t number) {
  for (int peer = 0; peer < size(); ++peer) {
    (mine_at(peer).*value).store(number, std::memory_order_release);
    peers_[static_cast<std::size_t>(peer)]->control().doorbell.ring();
  }
}

bool Group::is_gone(int peer) const {
  return peers_[static_cast<std::size_t>(peer)]->dead ||
         control().inbox[peer].left.load(std::memory_order_acquire) != 0;
}

std::string Group::why_gone(int peer) const {
  const bool left = control().inbox[peer].left.load(std::memory_order_acquire) != 0;
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

std::optional<Status> Group::all_reached(Counter value, std::uint64_t target,
                                         const char* what) const {
  if (Status open = closed(); !open.ok()) return open;
  // Looked up before the counters: what a peer did before it left still counts.
  std::vector<int> gone;
  for (int peer = 0; peer < size(); ++peer) {
    if (is_gone(peer)) gone.push_back(peer);
  }
  const std::vector<int> ranks = behind(value, target);
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
  return std::make_shared<Wait>(
      [self, value, target, what] { return self->all_reached(value, target, what); },
      [self, value, target, what] { return late(what, self->behind(value, target)); },
      deadline);
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
