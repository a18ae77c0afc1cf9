// How a function of the C ABI is answered: checks that all share, and what thread and
// device it is about.
#pragma once

#include <string>
#include <utility>

#include "emulator/core.h"
#include "emulator/cuda_runtime_functions.h"
#include "errors.h"
#include "machine.h"

namespace weightsync::emulator {

// What a call answers that is to fail before it does anything; ok for the others.
inline Outcome asked_to_fail(const char* function) {
  const int code = filtered_code(function);
  if (code == 0) return {};
  return {static_cast<cudaError_t>(code), "as a fault asks"};
}

// For functions that concern no device: `body()` says the outcome.
template <class Body>
cudaError_t anywhere(const char* function, Body body) {
  const Outcome asked = asked_to_fail(function);
  return finish(function, asked.ok() ? body() : asked);
}

// For functions about the current device: `body(machine, device)` says the outcome.
template <class Body>
cudaError_t on_device(const char* function, Body body) {
  if (Outcome asked = asked_to_fail(function); !asked.ok()) {
    return finish(function, asked);
  }
  Machine& it = machine();
  const int device = chosen_device();
  if (Outcome usable = it.check(device); !usable.ok()) return finish(function, usable);
  return finish(function, body(it, device));
}

// For functions about a stream: `body(machine, stream)`.
template <class Body>
cudaError_t on_stream(const char* function, cudaStream_t handle, Body body) {
  return on_device(function, [&](Machine& it, int device) -> Outcome {
    const std::shared_ptr<QueuedStream> stream = it.streams().find(handle, device);
    if (stream == nullptr) {
      return {cudaErrorInvalidResourceHandle, show(handle) + " is no stream"};
    }
    return body(it, stream);
  });
}

// For functions about an event: `body(machine, event)`.
template <class Body>
cudaError_t on_event(const char* function, cudaEvent_t handle, Body body) {
  return on_device(function, [&](Machine& it, int) -> Outcome {
    const std::shared_ptr<Event> event = it.event(handle);
    if (event == nullptr) {
      return {cudaErrorInvalidResourceHandle, show(handle) + " is no event"};
    }
    return body(it, *event);
  });
}

inline Outcome missing(const char* argument) {
  return invalid(std::string(argument) + " is null");
}

}  // namespace weightsync::emulator
