// The layout of a control segment: what a rank's peers tell it. docs/protocol.md,
// "Bytes".
//
// A rank owns one control segment for each configuration of its group. Every peer
// writes only its own Inbox in it, so there are no locks between processes, and a
// process that dies can leave nothing locked. A stale member of an earlier
// configuration has mapped an earlier segment and cannot reach this one.
#pragma once

#include <atomic>
#include <cstdint>

#include "futex.h"
#include "segment.h"

namespace weightsync::shm {

// Limits of one group; the segment is sparse, so unused inboxes cost no memory.
inline constexpr std::uint32_t kMaxRanks = 4096;
inline constexpr std::uint64_t kMagic = 0x31304d4853575357;  // "WSWSHM01"

// Where a rank's window lies, as told to a peer at registration.
struct WindowEntry {
  Locator memory;           // of the whole allocation
  std::uint64_t offset;     // of the window in it, bytes
  std::uint64_t nbytes;     // of the window
  std::uint64_t item_size;  // of the registered tensor's dtype, bytes
  std::int64_t dtype;       // c10::ScalarType, or -1 for a rank that exposes nothing
};

// What one peer tells the owner. Only that peer writes it; counters only grow.
struct alignas(64) Inbox {
  std::atomic<std::uint64_t> signals;   // raised by put and signal
  std::atomic<std::uint64_t> joined;    // digest of the configuration, 0 before
  std::atomic<std::uint64_t> barriers;  // barriers entered
  std::atomic<std::uint64_t> windows;   // windows announced
  std::atomic<std::uint64_t> left;      // the digest again, once the peer left
  // Two entries are enough: a peer announces window n+2 only after every rank announced
  // n+1, and a rank announces n+1 only after it read n.
  WindowEntry window[2];
};

struct Control {
  std::uint64_t magic;
  alignas(64) Doorbell doorbell;
  Inbox inbox[kMaxRanks];
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace weightsync::shm
