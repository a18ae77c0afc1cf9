// Meetings of hosts: how the ranks of a communicator agree outside of streams.
#include <chrono>
#include <cstring>
#include <string>

#include "emulator/nccl/comm.h"
#include "emulator/nccl/diagnosis.h"
#include "emulator/nccl/hash.h"
#include "emulator/nccl/shared_segments.h"

namespace weightsync::emulator::nccl {
namespace {

// How long a dead peer or an abort may go unnoticed.
constexpr std::chrono::milliseconds kLook{50};

std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

bool has_seen(const Meeting& meeting, std::uint64_t key) {
  for (const auto& seen : meeting.seen) {
    if (seen.load(std::memory_order_acquire) == key) return true;
  }
  return false;
}

}  // namespace

bool Communicator::has_left(int rank) {
  return control(rank).gone.load(std::memory_order_acquire) != 0 ||
         is_process_gone(control(rank).pid);
}

Outcome Communicator::await_rank(int rank, const std::string& what,
                                 const std::function<bool()>& condition) {
  if (condition()) return {};
  const diagnosis::Guard guard(
      *this, [&] { return "for " + rank_name(rank) + " to take part in " + what; });
  shm::Doorbell& bell = control().doorbell;
  const shm::Doorbell::Waiting waiting(bell);
  for (;;) {
    const std::uint32_t seen = bell.count();
    // Looked at before the condition: what a peer did before it left counts.
    const bool left = has_left(rank);
    if (condition()) return {};
    if (left) {
      return {ncclRemoteError,
              rank_name(rank) + " left or died before " + what + " was through"};
    }
    if (aborted()) return {ncclInternalError, what + " was aborted"};
    bell.wait(seen, shm::after(kLook));
  }
}

void Communicator::await_departures() {
  shm::Doorbell& bell = control().doorbell;
  const shm::Doorbell::Waiting waiting(bell);
  for (int rank = 0; rank < size_; ++rank) {
    if (control(rank).pid == control().pid || has_left(rank)) continue;
    const diagnosis::Guard guard(*this, [rank] {
      return "for " + rank_name(rank) + " to destroy or abort its communicator too";
    });
    for (;;) {
      const std::uint32_t seen = bell.count();
      if (has_left(rank)) break;
      bell.wait(seen, shm::after(kLook));
    }
  }
}

Outcome Communicator::meet(std::uint64_t key, const std::vector<int>& ranks,
                           const std::string& what, const Bytes& in,
                           std::vector<Bytes>& out) {
  if (in.size() > kExchangeBytes) {
    return {ncclInternalError, what + " exchanges " + std::to_string(in.size()) +
                                   " bytes; the emulator allows " +
                                   std::to_string(kExchangeBytes)};
  }
  const std::lock_guard one_at_a_time(meeting_mutex_);
  Meeting& mine = control().meeting;
  mine.nbytes = in.size();
  if (!in.empty()) std::memcpy(mine.bytes, in.data(), in.size());
  mine.key.store(key, std::memory_order_release);
  for (const int rank : ranks) ring(rank);

  out.assign(ranks.size(), {});
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const Meeting& theirs = control(ranks[i]).meeting;
    const Outcome there = await_rank(ranks[i], what, [&] {
      return theirs.key.load(std::memory_order_acquire) == key;
    });
    if (!there.ok()) return there;
    out[i].assign(theirs.bytes, theirs.bytes + theirs.nbytes);
  }

  std::uint64_t attended = 0;
  {
    const shm::MutexLock lock(mu_);
    attended = meetings_++;
  }
  mine.seen[attended % Meeting::kRemembered].store(key, std::memory_order_release);
  for (const int rank : ranks) ring(rank);
  for (const int rank : ranks) {
    const Meeting& theirs = control(rank).meeting;
    const Outcome seen = await_rank(rank, what, [&] { return has_seen(theirs, key); });
    if (!seen.ok()) return seen;
  }
  return {};
}

Outcome Communicator::exchange(const std::string& what, const Bytes& in,
                               std::vector<Bytes>& out) {
  std::uint64_t round = 0;
  {
    const shm::MutexLock lock(mu_);
    round = exchanges_++;
  }
  control().exchanged.store(round + 1, std::memory_order_release);
  const std::uint64_t key = hash({members_.identity, kExchangeKey, round});
  return meet(key, all_ranks(), what, in, out);
}

}  // namespace weightsync::emulator::nccl
