// Monitor: a thread that learns at once when a process dies.
//
// A pidfd becomes readable when its process ends, however it ends. Threads of one
// process that form a group among themselves need no monitor.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "owned_thread.h"
#include "status.h"

namespace weightsync::shm {

class Monitor {
 public:
  Monitor() = default;
  ~Monitor() { stop(); }
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // Remembers process `pid` as peer number `peer`; kPeer if it is gone already.
  Status watch(int peer, std::int64_t pid);

  // Starts the thread; `on_death(peer)` is called from it. Nothing watched: no thread.
  Status start(std::function<void(int)> on_death);

  // Ends the thread and closes the descriptors. Idempotent; from one thread at a time.
  // A forked child closes its own descriptors and leaves its parent's thread alone.
  void stop();

 private:
  void run(const std::function<void(int)>& on_death) const;

  struct Watched {
    int peer;
    int pidfd;
  };

  // Constant while the thread runs.
  std::vector<Watched> watched_;
  int stop_fd_ = -1;
  const Origin origin_;
  OwnedThread thread_;
};

}  // namespace weightsync::shm
