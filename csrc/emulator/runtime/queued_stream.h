// QueuedStream: operations that one thread carries out in order.
//
// The thread starts with the first operation and is never joined: it holds the stream,
// and ends when the stream was destroyed and everything queued has run. Signals are
// left to the threads of the program. Any thread may call anything but wait_for(),
// which must not be called by the stream's own operations.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "emulator/core.h"
#include "shm/annotations.h"
#include "shm/futex.h"

namespace weightsync::emulator {

class QueuedStream;

// A point in a stream: reached when as many operations have run.
struct Point {
  std::shared_ptr<QueuedStream> stream;
  std::uint64_t count = 0;
};

// What a stream is made with.
struct StreamTraits {
  int device = 0;
  std::string name;
  unsigned flags = 0;
  int priority = 0;
};

class QueuedStream final : public Stream,
                           public std::enable_shared_from_this<QueuedStream> {
 public:
  // Adds the points that an operation of this stream must wait for, then puts the
  // operation into the queue with the function it is given. Lets whoever owns the
  // streams order them among each other.
  using Put = std::function<void(std::vector<Point> before)>;
  using Order = std::function<void(QueuedStream& stream, const Put& put)>;
  // Told why no thread could be started; what is queued is then dropped.
  using Failed = std::function<void(int device, const std::string& reason)>;

  QueuedStream(StreamTraits traits, Order order, Failed failed)
      : traits_(std::move(traits)),
        order_(std::move(order)),
        failed_(std::move(failed)) {}

  int device() const override { return traits_.device; }
  CUstream_st* handle() const override;
  std::string name() const override { return traits_.name; }
  void enqueue(std::string what, std::function<void()> run) override;
  void mark(std::string what, std::function<void()> run) override;
  bool is_idle() const override;
  void synchronize() override;

  unsigned flags() const { return traits_.flags; }
  int priority() const { return traits_.priority; }

  // The point after what is queued now; nothing where that has run.
  std::optional<Point> last_point();
  void wait_for(std::uint64_t count);
  // Nothing more will come: the thread ends when the queue is empty.
  void close();

  // What it does, unless it is idle.
  std::optional<StreamReport> report();
  void set_note(std::string note, std::string call_site);

 private:
  struct Operation {
    std::string what;
    std::function<void()> run;
    std::vector<Point> before;
  };
  struct Running {
    std::string what;
    std::string note;
    std::string call_site;
    std::chrono::steady_clock::time_point since;
  };

  void put(Operation operation);
  // Under the lock: starts the thread unless it runs; why it cannot.
  shm::Status start_thread() WEIGHTSYNC_REQUIRES(mu_);
  void drop_all(const std::string& reason);
  void work();
  bool work_once();
  std::optional<Operation> next();
  void carry_out(const Operation& operation);

  // Constant after construction.
  const StreamTraits traits_;
  const Order order_;
  const Failed failed_;

  // Rung when an operation is queued, has run, or the stream is closed.
  shm::Doorbell bell_{};
  std::atomic<std::uint64_t> queued_{0};  // written under mu_
  std::atomic<std::uint64_t> done_{0};    // written under mu_
  std::atomic<bool> closed_{false};

  shm::Mutex mu_;
  std::deque<Operation> queue_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::optional<Running> running_ WEIGHTSYNC_GUARDED_BY(mu_);
  bool started_ WEIGHTSYNC_GUARDED_BY(mu_) = false;
};

// The stream whose thread calls; null for other threads.
QueuedStream* running_stream();

}  // namespace weightsync::emulator
