// Proxy: the thread through which puts reach peers that are behind a "network".
//
// Stands for NCCL's progress thread and the network card: the stream of a put waits
// until its transfer is reported done, and a transfer to a peer that is dead or has
// left never is. Transfers run one after the other, in the order of post().
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "shm/owned_thread.h"

namespace weightsync::emulator::nccl {

class Proxy {
 public:
  struct Transfer {
    std::function<bool()> reachable;  // whether the peer is still there
    std::function<bool()> run;        // the data, then the signal; false: refused
    std::function<void()> report;     // tells the stream that it is done
  };

  Proxy() = default;
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // Any thread. What a transfer refers to must live until report() has returned: see
  // settle().
  void post(Transfer transfer);
  // Returns when no report() is under way.
  void settle();

 private:
  void work();

  std::mutex mutex_;
  std::mutex reporting_;
  std::condition_variable posted_;
  // Guarded by mutex_.
  std::deque<Transfer> transfers_;
  bool stopping_ = false;
  shm::OwnedThread thread_;
};

}  // namespace weightsync::emulator::nccl
