// Streams: all streams of a process, and their order among each other.
//
// The legacy default stream of a device and its blocking streams wait for each other as
// CUDA says: an operation of the one starts after what was enqueued before on the
// other. Non-blocking streams are left out. Thread-safe.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "cuda/abi.h"
#include "outcome.h"
#include "queued_stream.h"
#include "shm/annotations.h"

namespace weightsync::emulator {

class Streams {
 public:
  Streams(int devices, QueuedStream::Failed failed);

  // A new stream of a device.
  std::shared_ptr<QueuedStream> create(int device, unsigned flags, int priority);
  // Takes the stream from the table; what is queued still runs. False: not there.
  bool destroy(cudaStream_t handle);

  // Handles 0, 1 and 2 mean the default streams of `device`. Null: no stream.
  std::shared_ptr<QueuedStream> find(cudaStream_t handle, int device);

  // All streams of a device that exist or still run something.
  std::vector<std::shared_ptr<QueuedStream>> of_device(int device);
  void synchronize(int device);
  std::vector<StreamReport> reports();

 private:
  struct Device {
    std::shared_ptr<QueuedStream> legacy;
    std::vector<std::weak_ptr<QueuedStream>> created;
  };

  std::shared_ptr<QueuedStream> make(StreamTraits traits);
  std::shared_ptr<QueuedStream> per_thread(int device);
  std::shared_ptr<QueuedStream> add(StreamTraits traits);
  void put_in_order(QueuedStream& stream, const QueuedStream::Put& put);
  std::vector<Point> points_before(QueuedStream& stream) WEIGHTSYNC_REQUIRES(mu_);

  // Constant after construction.
  const QueuedStream::Failed failed_;

  shm::Mutex mu_;
  std::vector<Device> devices_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::unordered_map<cudaStream_t, std::shared_ptr<QueuedStream>> table_
      WEIGHTSYNC_GUARDED_BY(mu_);
  int next_ WEIGHTSYNC_GUARDED_BY(mu_) = 1;
};

}  // namespace weightsync::emulator
