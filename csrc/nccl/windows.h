// Windows: the memory of one communicator that its ranks can put into and out of.
//
// Whole allocations are registered, by all ranks together, in rounds: each round makes
// one window of NCCL, of one allocation of every rank. A rank that has nothing new
// brings memory that serves nothing else. What is registered stays so until it is
// freed, or the communicator ends.
//
// Also where the ranks agree before they register: through the communicator, so that no
// other way between them is needed.
//
// Shared by the session and by what frees memory. Any thread may call anything; what is
// collective is called by one thread at a time, which holds meeting().
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "nccl/aside.h"
#include "nccl/communicator.h"

namespace weightsync::nccl {

class Windows : public std::enable_shared_from_this<Windows> {
 public:
  explicit Windows(Communicator::Pointer communicator);
  // Frees its own memory if the communicator came to a good end. Blocks for nobody.
  ~Windows();
  Windows(const Windows&) = delete;
  Windows& operator=(const Windows&) = delete;

  // What a rank tells all others: their meaning is the caller's.
  using Words = std::array<std::int64_t, 7>;

  // --- collective: each returns when all ranks have called it, or at the deadline ---

  std::mutex& meeting() { return meeting_; }
  const Library& library() const { return communicator_->library(); }

  // What each rank says. What was issued on this communicator before is over then, on
  // all ranks.
  Result<std::vector<Words>> exchange(const Words& mine, cudaStream_t stream,
                                      Deadline deadline);
  // The next round, with this memory. A round that fails is counted too. kUnsupported,
  // with the reason, where NCCL makes no window. An error of `interrupted`, which is
  // asked now and then, ends the wait for NCCL.
  Status add(void* base, std::size_t bytes, Deadline deadline,
             const Interrupted& interrupted = nullptr);
  // What the first one-sided call does, which before 2.31 waits for all ranks. Once.
  Status warm_up(cudaStream_t stream, Deadline deadline);

  // --- local ---

  // Memory for a round in which this rank has nothing to bring; kept.
  Result<void*> fill_in(std::size_t bytes);

  struct Round {
    ncclWindow_t handle = nullptr;  // null: it failed, or its memory here was freed
    void* base = nullptr;
    std::size_t bytes = 0;
  };
  // The number of the round in which this allocation was registered, or -1.
  std::int64_t round_of(const void* base) const;
  Round round(std::int64_t number) const;
  std::int64_t rounds() const;

  // Before this allocation is freed. False: it is in use for ever, and must be kept.
  bool forget(const void* base);

 private:
  Status register_now(void* base, std::size_t bytes, Round& made);
  Status exchange_now(const Words& mine, cudaStream_t stream, std::vector<Words>& all);
  Status issue_exchange(const Words& mine, cudaStream_t stream,
                        std::vector<Words>& all);
  Status warm_up_now(cudaStream_t stream);
  // Runs with the calling thread on the device, and nobody else issuing.
  Status aside(const std::string& what, Deadline deadline, std::function<Status()> work,
               const Interrupted& interrupted = nullptr);

  // Constant after construction.
  const Communicator::Pointer communicator_;

  std::mutex meeting_;
  bool warm_ = false;               // guarded by meeting_
  std::byte* exchanged_ = nullptr;  // guarded by meeting_; on the device
  std::vector<void*> filled_;       // guarded by meeting_

  mutable std::mutex mu_;
  std::vector<Round> rounds_;  // guarded by mu_
};

}  // namespace weightsync::nccl
