// CUDA runtime: events.
#include "api.h"

namespace weightsync::emulator {
namespace {

Outcome create_event(cudaEvent_t* result, unsigned flags, Machine& it, int device) {
  constexpr unsigned kKnown =
      cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
  if (result == nullptr) return missing("event");
  const bool interprocess = (flags & cudaEventInterprocess) != 0;
  const bool timed = (flags & cudaEventDisableTiming) == 0;
  if ((flags & ~kKnown) != 0 || (interprocess && timed)) {
    return invalid("events have no flags " + std::to_string(flags) +
                   "; interprocess ones have no timing");
  }
  auto made = Event::create(device, flags);
  if (!made.ok()) return outcome_of(made.status());
  *result = it.add(made.take());
  return {};
}

Outcome check_timed(const Event& event) {
  if ((event.flags() & cudaEventDisableTiming) != 0 || !event.is_recorded()) {
    return {cudaErrorInvalidResourceHandle, event.is_recorded()
                                                ? "the event has no timing"
                                                : "the event was never recorded"};
  }
  if (!event.is_reached()) return {cudaErrorNotReady, ""};
  return {};
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

cudaError_t cudaEventCreate(cudaEvent_t* result) {
  return on_device(__func__, [&](Machine& it, int device) {
    return create_event(result, 0, it, device);
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* result, unsigned flags) {
  return on_device(__func__, [&](Machine& it, int device) {
    return create_event(result, flags, it, device);
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  return on_device(__func__, [&](Machine& it, int) -> Outcome {
    if (it.remove(handle)) return {};
    return {cudaErrorInvalidResourceHandle, show(handle) + " is no event"};
  });
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream,
                                     unsigned) {
  return on_stream(__func__, stream, [&](Machine& it, const auto& on) -> Outcome {
    const std::shared_ptr<Event> event = it.event(handle);
    if (event == nullptr || event->device() != on->device()) {
      return {cudaErrorInvalidResourceHandle,
              event == nullptr
                  ? show(handle) + " is no event"
                  : "an event of device " + std::to_string(event->device()) +
                        " cannot be recorded on " + on->name()};
    }
    event->record(*on);
    return {};
  });
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return cudaEventRecordWithFlags(handle, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return on_event(__func__, handle, [](Machine&, Event& event) -> Outcome {
    if (event.is_reached()) return {};
    return {cudaErrorNotReady, ""};
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return on_event(__func__, handle, [](Machine& it, Event& event) {
    event.synchronize();
    return it.faults().of(event.device());
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start,
                                 cudaEvent_t end) {
  return on_event(__func__, start, [&](Machine& it, Event& first) -> Outcome {
    const std::shared_ptr<Event> last = it.event(end);
    if (last == nullptr || milliseconds == nullptr) return missing("an argument");
    if (Outcome timed = check_timed(first); !timed.ok()) return timed;
    if (Outcome timed = check_timed(*last); !timed.ok()) return timed;
    *milliseconds = static_cast<float>(Event::elapsed(first, *last));
    return {};
  });
}

// CUDA 12.8 and later under this name too.
cudaError_t cudaEventElapsedTime_v2(float* milliseconds, cudaEvent_t start,
                                    cudaEvent_t end) {
  return cudaEventElapsedTime(milliseconds, start, end);
}

}  // extern "C"
#pragma GCC visibility pop
