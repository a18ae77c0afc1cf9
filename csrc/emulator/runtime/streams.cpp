#include "streams.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace weightsync::emulator {
namespace {

using shm::MutexLock;
using Shared = std::shared_ptr<QueuedStream>;

std::string on_device(int device) { return "device " + std::to_string(device) + ", "; }

// The per-thread default streams of a thread, which end with it.
class OfThread {
 public:
  ~OfThread() {
    for (const auto& [device, stream] : streams_) stream->close();
  }
  Shared& operator[](int device) { return streams_[device]; }

 private:
  std::map<int, Shared> streams_;
};

}  // namespace

Streams::Streams(int devices, QueuedStream::Failed failed)
    : failed_(std::move(failed)) {
  const MutexLock lock(mu_);
  devices_.resize(devices);
  for (int device = 0; device < devices; ++device) {
    devices_[device].legacy =
        make({device, on_device(device) + "default stream", 0, 0});
  }
}

Shared Streams::make(StreamTraits traits) {
  const auto order = [this](QueuedStream& stream, const QueuedStream::Put& put) {
    put_in_order(stream, put);
  };
  return std::make_shared<QueuedStream>(std::move(traits), order, failed_);
}

Shared Streams::add(StreamTraits traits) {
  const MutexLock lock(mu_);
  const std::string kind = traits.name.empty() ? "stream " : traits.name;
  traits.name = on_device(traits.device) + kind + std::to_string(next_++);
  Shared stream = make(std::move(traits));
  auto& created = devices_[stream->device()].created;
  const auto is_gone = [](const auto& weak) { return weak.expired(); };
  created.erase(std::remove_if(created.begin(), created.end(), is_gone), created.end());
  created.push_back(stream);
  return stream;
}

Shared Streams::create(int device, unsigned flags, int priority) {
  Shared stream = add({device, "", flags, priority});
  const MutexLock lock(mu_);
  table_.emplace(stream->handle(), stream);
  return stream;
}

bool Streams::destroy(cudaStream_t handle) {
  Shared stream;
  {
    const MutexLock lock(mu_);
    const auto found = table_.find(handle);
    if (found == table_.end()) return false;
    stream = std::move(found->second);
    table_.erase(found);
  }
  stream->close();
  return true;
}

Shared Streams::per_thread(int device) {
  thread_local OfThread streams;
  Shared& stream = streams[device];
  if (!stream) stream = add({device, "per-thread stream ", 0, 0});
  return stream;
}

Shared Streams::find(cudaStream_t handle, int device) {
  if (handle == cudaStreamPerThread) return per_thread(device);
  const MutexLock lock(mu_);
  if (handle == nullptr || handle == cudaStreamLegacy) return devices_[device].legacy;
  const auto found = table_.find(handle);
  return found == table_.end() ? nullptr : found->second;
}

// One enqueue at a time where order among streams matters: what one stream sees of
// another's queue is then what the program enqueued before.
void Streams::put_in_order(QueuedStream& stream, const QueuedStream::Put& put) {
  if ((stream.flags() & cudaStreamNonBlocking) != 0) return put({});
  const MutexLock lock(mu_);
  put(points_before(stream));
}

std::vector<Point> Streams::points_before(QueuedStream& stream) {
  const Device& device = devices_[stream.device()];
  std::vector<Point> points;
  const auto wait_for = [&points](QueuedStream& other) {
    if (std::optional<Point> point = other.last_point()) points.push_back(*point);
  };
  if (&stream != device.legacy.get()) {
    wait_for(*device.legacy);
    return points;
  }
  for (const auto& weak : device.created) {
    const Shared other = weak.lock();
    if (other && (other->flags() & cudaStreamNonBlocking) == 0) wait_for(*other);
  }
  return points;
}

std::vector<Shared> Streams::of_device(int device) {
  const MutexLock lock(mu_);
  std::vector<Shared> streams = {devices_[device].legacy};
  for (const auto& weak : devices_[device].created) {
    if (Shared stream = weak.lock()) streams.push_back(std::move(stream));
  }
  return streams;
}

void Streams::synchronize(int device) {
  for (const Shared& stream : of_device(device)) stream->synchronize();
}

std::vector<StreamReport> Streams::reports() {
  std::vector<Shared> streams;
  {
    const MutexLock lock(mu_);
    for (const Device& device : devices_) {
      streams.push_back(device.legacy);
      for (const auto& weak : device.created) {
        if (Shared stream = weak.lock()) streams.push_back(std::move(stream));
      }
    }
  }
  std::vector<StreamReport> reports;
  for (const Shared& stream : streams) {
    if (auto report = stream->report()) reports.push_back(std::move(*report));
  }
  return reports;
}

}  // namespace weightsync::emulator
