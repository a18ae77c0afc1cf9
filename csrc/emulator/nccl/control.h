// The layout of a control segment: what a rank's peers read and write in it.
//
// A rank owns one control segment for each communicator and maps those of its peers.
// Every field has exactly one writer, named beside it; counters only grow. So there is
// no lock between processes, and a process that dies leaves nothing locked. Whoever
// changes a field that another rank may wait for rings that rank's doorbell afterwards.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "emulator/nccl/shared_text.h"
#include "shm/futex.h"
#include "shm/segment.h"

namespace weightsync::emulator::nccl {

inline constexpr int kMaxRanks = 16;
inline constexpr std::uint64_t kControlMagic = 0x31304c43434e5357;  // "WSNCCL01"

inline constexpr std::size_t kDescriptorBytes = 256;
inline constexpr std::size_t kExchangeBytes = 8192;
inline constexpr std::uint64_t kPostRing = 4;
inline constexpr std::uint64_t kInboxRing = 16;
inline constexpr int kRmaContexts = 4;  // NCCL allows more from 2.31 on, 1 before

// Any trivially copyable struct of at most kDescriptorBytes.
using DescriptorBytes = std::byte[kDescriptorBytes];

// Where hosts meet (meeting.cpp): what the owner brings to the meeting with this key,
// and which it has attended. Writer: the owner.
struct Meeting {
  static constexpr std::uint64_t kRemembered = 8;

  std::atomic<std::uint64_t> key;
  std::atomic<std::uint64_t> seen[kRemembered];  // the last ones, in a ring
  std::uint64_t nbytes;
  std::byte bytes[kExchangeBytes];
};

// The id of a grow that is under way (ncclCommGetUniqueId). Writer: the owner.
struct GrowthPost {
  std::atomic<std::uint64_t> generation;  // Communicator::children() + 1; 0: none
  char id[128];
};

// The descriptor of one collective. Writer: the owner.
struct Post {
  DescriptorBytes bytes;
};

// What one peer tells the owner. Writer: that peer, except `taken`.
struct alignas(64) Inbox {
  std::atomic<std::uint64_t> posted;  // sends announced, of this (source, owner) pair
  // Arrivals of put and signal, by context (rma.cpp).
  std::atomic<std::uint64_t> signals[kRmaContexts];
  // Descriptor of send n at n % kInboxRing; may be written once taken > n - kInboxRing.
  DescriptorBytes ring[kInboxRing];
  alignas(64) std::atomic<std::uint64_t> taken;  // sends received; writer: the owner
};

struct Control {
  std::uint64_t magic;
  std::int64_t pid;  // of the owner
  alignas(64) shm::Doorbell doorbell;

  // Writer of all below: the owner.
  alignas(64) std::atomic<std::uint64_t> exchanged;  // rounds of exchange() entered
  std::atomic<std::uint32_t> gone;  // the communicator was destroyed or aborted
  alignas(64) std::atomic<std::uint64_t> posted;  // collectives announced in posts
  std::atomic<std::uint64_t> step;  // Execution::barrier: collective * kSteps + phase
  SharedText blocked;               // what the owner is blocked in, for diagnosis
  Meeting meeting;
  GrowthPost growth;
  Post posts[kPostRing];  // collective n at n % kPostRing

  Inbox inbox[kMaxRanks];  // by rank of the source
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace weightsync::emulator::nccl
