// Bell: an eventfd that CUDA rings when a stream has come to a point.
//
// What rings is a host function of CUDA, which never runs where the stream has failed
// or stands still: whoever waits for a bell needs another end for that. Its lock is
// held for a write alone, so the host function waits for nobody who calls CUDA.
//
// Any thread may call anything.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <mutex>

namespace weightsync {

class Bell {
 public:
  Bell();
  ~Bell();
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;

  // Readable from the first ring on; closed with `close`.
  int fileno() const { return descriptor_; }
  void ring();
  // Nobody listens any more; what rings later does nothing. Idempotent.
  void close();

  // Rings it when the stream has done what it was given until now. Raises what CUDA
  // says.
  static void ring_after(const std::shared_ptr<Bell>& bell, const c10::Stream& stream);

 private:
  const int descriptor_;

  std::mutex mu_;
  bool open_ = true;  // guarded by mu_
};

}  // namespace weightsync
