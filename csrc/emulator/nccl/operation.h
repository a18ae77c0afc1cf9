// Operation: one piece of work of a communicator on a stream; Execution: what it gets
// while it runs there.
//
// Life of an operation: made by the call (which has checked its arguments), added to
// the thread's group, and at the outermost end of the group, for each communicator,
//   1. sorted by phase (stable), neighbours fused by absorb(),
//   2. prepare() of all operations of all communicators, on the host;
//      the first failure drops the whole group,
//   3. launch() and a place in the communicator's order, on the host,
//   4. run() on the thread of the launch stream, after the operation before it in the
//      communicator's order (and in those it shares resources with) has ended.
// Steps 2 and 3 run on the caller's thread, or on a background thread if the
// communicator is nonblocking. Arguments that the ABI lets go at return must be copied
// by the call; the bytes of user buffers must only be read by run().
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "emulator/nccl/control.h"
#include "emulator/nccl/outcome.h"

namespace weightsync::emulator::nccl {

class Communicator;
class Execution;

// In the order in which NCCL schedules them inside one group, whatever the order of
// the calls.
enum class Phase : std::uint8_t { kOneSided, kCollective, kPointToPoint };

// An API call: what diagnosis names.
struct CallSite {
  const char* function = "";      // "ncclAllReduce"
  const void* address = nullptr;  // where it was called from
};

class Operation {
 public:
  virtual ~Operation() = default;

  // The call that made it; add_operation() notes it.
  const CallSite& call() const { return call_; }
  void set_call(const CallSite& call) { call_ = call; }

  virtual Phase phase() const = 0;
  // For messages and diagnosis: "ncclAllReduce of 4 float32". Any thread, any time.
  virtual std::string describe() const = 0;
  // Takes over `next`, which directly follows in the same group, phase and
  // communicator. True if it did; `next` is then dropped. Sends and receives of a group
  // become one operation so, and puts up to the next wait.
  virtual bool absorb(Operation& /*next*/) { return false; }
  // Everything that can still fail; may block the host (Communicator::exchange).
  virtual Outcome prepare(Communicator& /*communicator*/) { return {}; }
  // In the order of launches of this communicator: host-side counters advance here.
  virtual Outcome launch(Communicator& /*communicator*/) { return {}; }
  // On the stream's thread. What it waits for, it waits for through Execution. A
  // failure becomes the communicator's async error.
  virtual Outcome run(Execution& execution) = 0;

 private:
  CallSite call_;
};

// Memory of any rank, as told to others. Plain numbers: goes into descriptors.
struct Remote {
  shm::Locator memory;        // of the whole allocation's segment
  std::uint64_t offset = 0;   // in the segment, bytes
  std::uint64_t address = 0;  // in the owner's process
  std::uint64_t nbytes = 0;   // from there to the end of the allocation
};

// Where the calling process has this address: null memory.fd (-1) for memory that
// peers cannot reach (plain host memory). Any thread.
Remote locate(const void* address);

// Whether a wait ends when the communicator is aborted or revoked: collectives and
// send/receive do, a wait for signals does not (section 3.3 of the contract).
enum class OnAbort : std::uint8_t { kReturn, kKeepWaiting };

class Execution {
 public:
  Execution(Communicator& communicator, std::uint64_t collective, std::uint64_t place,
            std::string call_site)
      : communicator_(communicator),
        collective_(collective),
        place_(place),
        call_site_(std::move(call_site)) {}
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  Communicator& communicator() { return communicator_; }
  // The number of this collective in its communicator, from 0; the same on all ranks
  // that call in the same order. Only operations of Phase::kCollective have one.
  std::uint64_t collective() const { return collective_; }
  // Of the call that made the operation, in words.
  const std::string& call_site() const { return call_site_; }

  // True once this rank's abort flag is up. An operation that sees it leaves at once;
  // its results are undefined then. Never an error by itself.
  bool aborted() const;

  // Sleeps on this rank's doorbell until the condition holds. False: aborted.
  // `missing` says, for diagnosis, what is waited for: "rank 3 to call ncclAllReduce".
  bool wait(const std::function<bool()>& condition,
            const std::function<std::string()>& missing,
            OnAbort on_abort = OnAbort::kReturn);

  // Collectives: tells `mine` to all ranks and waits for theirs (own one included, by
  // rank). False: aborted.
  template <class Descriptor>
  bool exchange(const Descriptor& mine, std::vector<Descriptor>& all) {
    static_assert(std::is_trivially_copyable_v<Descriptor>);
    static_assert(sizeof(Descriptor) <= kDescriptorBytes);
    publish(&mine, sizeof mine);
    all.resize(static_cast<std::size_t>(size()));
    for (int rank = 0; rank < size(); ++rank) {
      const std::byte* const bytes = await(rank);
      if (bytes == nullptr) return false;
      std::memcpy(&all[static_cast<std::size_t>(rank)], bytes, sizeof(Descriptor));
    }
    return true;
  }

  // Collectives: waits until every rank came to its barrier of the same number in this
  // collective (at most kSteps - 1 of them). False: aborted. A collective that lets
  // peers read or write its buffers ends with one.
  bool barrier();
  static constexpr std::uint64_t kSteps = 64;

  // The address of a peer's (or one's own) memory in this process; null if it cannot
  // be mapped (its owner died or freed it). Cached by the communicator; valid until
  // this goes, whatever its owner does.
  std::byte* map(const Remote& remote);

 private:
  int size() const;
  void publish(const void* bytes, std::size_t nbytes);
  const std::byte* await(int rank);

  Communicator& communicator_;
  const std::uint64_t collective_;
  const std::uint64_t place_;  // in the serial order
  const std::string call_site_;
  std::uint64_t step_ = 0;
  std::vector<std::shared_ptr<std::byte>> mapped_;
};

}  // namespace weightsync::emulator::nccl
