// Recording: what the flight recorder is told of one process group.
//
// Counts its calls as all ranks do, so that they can be held against each other. Any
// thread may call anything; nothing here blocks.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "recorder/recorder.h"

namespace weightsync {

class Recording {
 public:
  using Tensors = std::vector<at::Tensor>;

  // A call of c10d. What it refers to lives as long as the call.
  struct Exchange {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    const Tensors& inputs;
    const Tensors& outputs;
    int peer = -1;
  };

  // What a call of a window has to do with one peer.
  struct OneSided {
    int peer = -1;
    std::int64_t signals = 1;
    std::int64_t offset = 0;  // bytes of the peer's window
    std::int64_t bytes = 0;
  };

  // Fails what it was given at its end, unless it is kept: an error was raised then.
  class Open {
   public:
    explicit Open(std::vector<recorder::Ticket> tickets)
        : tickets_(std::move(tickets)) {}
    ~Open();
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;
    // They were issued; whoever takes them finishes them.
    std::vector<recorder::Ticket> keep() { return std::exchange(tickets_, {}); }

   private:
    std::vector<recorder::Ticket> tickets_;
  };

  // `group` lives longer than this, and has its rank and size.
  Recording(const c10d::Backend& group, std::vector<std::int64_t> ranks,
            const std::string& prefix);

  // The name of the group is known, or its description.
  void named();
  // The group has other members from now on, and counts anew. `generation` is the same
  // for all of them.
  void members_changed(const std::string& generation);

  // One call, or the calls of a batch in their order. `counts`: as a collective.
  std::vector<recorder::Ticket> begin(const std::vector<Exchange>& calls, bool counts,
                                      std::chrono::milliseconds timeout);
  // "put", "put_many" and "signal" count up the signals to each peer, "wait_signal"
  // those of each peer that are taken. `name` is constant text.
  std::vector<recorder::Ticket> begin_one_sided(const char* name,
                                                const std::vector<OneSided>& calls,
                                                std::chrono::milliseconds timeout);
  // "reconfigure", "split", "shrink".
  recorder::Ticket begin_membership(const char* name,
                                    std::chrono::milliseconds timeout);
  static void finish(const std::vector<recorder::Ticket>& tickets, bool done);

 private:
  using Peers = std::map<int, std::int64_t>;

  recorder::Operation describe(const Exchange& call) const;
  recorder::GroupPointer group();
  void count(recorder::Operation& operation);

  // Constant after construction.
  const c10d::Backend& backend_;
  const std::vector<std::int64_t> ranks_;  // of the job; empty: all, in their order

  std::mutex mu_;
  recorder::GroupPointer group_;     // guarded by mu_
  std::string described_;            // guarded by mu_
  std::string generation_;           // guarded by mu_
  std::int64_t collectives_ = 0;     // guarded by mu_
  std::int64_t point_to_point_ = 0;  // guarded by mu_
  std::int64_t calls_ = 0;           // guarded by mu_
  Peers sent_;                       // guarded by mu_
  Peers received_;                   // guarded by mu_
  Peers signalled_;                  // guarded by mu_
  Peers waited_;                     // guarded by mu_
};

}  // namespace weightsync
