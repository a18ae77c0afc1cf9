// How a group is formed: handles, and the agreement on one configuration.
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "group.h"

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

}  // namespace

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
  digest_ = std::max<std::uint64_t>(digest, 1);  // 0 means "not yet"
  if (Status known = publish(open_peers(handles)); !known.ok()) return known;
  std::vector<std::uint64_t> ended(peers_.size());
  for (int peer = 0; peer < size(); ++peer) {
    ended[static_cast<std::size_t>(peer)] = ended_attempt(control().inbox[peer]);
  }
  if (Status alike = announce(); !alike.ok()) return alike;
  const auto others = [this] { return not_joined(); };
  const Wait::Check check = [this, others, ended]() -> std::optional<Status> {
    std::optional<Status> came = all_came(others, kForming);
    // Last, so that nobody's word comes between unseen.
    if (Status alike = joined_alike(ended); !alike.ok()) return alike;
    return came;
  };
  const auto missing = [others] { return late(kForming, others()); };
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

std::uint64_t Group::ended_attempt(const Inbox& inbox) const {
  const std::uint64_t joined = inbox.joined.load(std::memory_order_acquire);
  const bool left = inbox.left.load(std::memory_order_acquire) == joined;
  return left && joined != digest_ ? joined : 0;
}

Status Group::announce() {
  std::vector<std::uint64_t> ended(peers_.size());
  for (int peer = 0; peer < size(); ++peer) {
    ended[static_cast<std::size_t>(peer)] = ended_attempt(mine_at(peer));
  }
  Status outcome;
  for (int peer = 0; peer < size(); ++peer) {
    // Who is given the handles in another order may believe to be this very rank. Its
    // word would be lost under ours, so the one who comes second has to notice.
    const std::uint64_t before = mine_at(peer).joined.exchange(digest_);
    peers_[static_cast<std::size_t>(peer)]->control().doorbell.ring();
    const bool expected =
        before == digest_ || before == ended[static_cast<std::size_t>(peer)];
    if (before != 0 && !expected) outcome = {Code::kInvalid, kDisagree};
  }
  return outcome;
}

Status Group::joined_alike(const std::vector<std::uint64_t>& ended) const {
  for (const int peer : not_joined()) {
    const std::uint64_t theirs =
        control().inbox[peer].joined.load(std::memory_order_acquire);
    const bool expected = theirs == 0 || theirs == digest_ ||
                          theirs == ended[static_cast<std::size_t>(peer)];
    if (!expected) {
      return {Code::kInvalid, "rank " + std::to_string(peer) + ": " + kDisagree};
    }
  }
  return {};
}

std::vector<int> Group::not_joined() const {
  std::vector<int> ranks;
  for (int peer = 0; peer < size(); ++peer) {
    const Inbox& inbox = control().inbox[peer];
    if (inbox.joined.load(std::memory_order_acquire) != digest_) ranks.push_back(peer);
  }
  return ranks;
}

}  // namespace weightsync::shm
