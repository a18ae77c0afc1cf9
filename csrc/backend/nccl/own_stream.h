// OwnStream: a stream of CUDA that nobody else has.
//
// The streams that torch gives away come from a small pool, in turn: two who asked may
// have the same one. What NCCL issues may never end, and must hold up nobody else.
#pragma once

#include <c10/core/Stream.h>

#include <memory>

#include "cuda/abi.h"

namespace weightsync {

class OwnStream {
 public:
  // On a device of CUDA. It waits for no other stream, nor others for it. Raises.
  static std::shared_ptr<OwnStream> make(c10::Device device, bool high_priority);

  const c10::Stream& stream() const { return stream_; }
  // It will never be idle: it is left to itself. Any thread.
  void leave() { left_ = true; }

  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

 private:
  OwnStream(c10::Device device, cudaStream_t handle);

  const cudaStream_t handle_;
  const c10::Stream stream_;
  bool left_ = false;  // written before the last owner goes
};

}  // namespace weightsync
