// CUDA runtime: streams and host functions. There is no capture: asking whether there
// is one is answered with no, starting one is in api_unsupported.cpp.
#include "api.h"

namespace weightsync::emulator {
namespace {

Outcome create_stream(cudaStream_t* result, unsigned flags, int priority, Machine& it,
                      int device) {
  if (result == nullptr) return missing("pStream");
  if ((flags & ~cudaStreamNonBlocking) != 0) {
    return invalid("streams have no flags " + std::to_string(flags));
  }
  *result = it.streams().create(device, flags, priority)->handle();
  return {};
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* result) {
  return on_device(__func__, [&](Machine& it, int device) {
    return create_stream(result, 0, 0, it, device);
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* result, unsigned flags) {
  return on_device(__func__, [&](Machine& it, int device) {
    return create_stream(result, flags, 0, it, device);
  });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* result, unsigned flags,
                                         int priority) {
  return on_device(__func__, [&](Machine& it, int device) {
    return create_stream(result, flags, priority, it, device);
  });
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return on_device(__func__, [&](Machine& it, int) -> Outcome {
    if (it.streams().destroy(handle)) return {};
    return {cudaErrorInvalidResourceHandle,
            show(handle) + " is no stream that was created, or destroyed before"};
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return on_stream(__func__, handle, [](Machine& it, const auto& stream) {
    stream->synchronize();
    return it.faults().of(stream->device());
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return on_stream(__func__, handle, [](Machine&, const auto& stream) -> Outcome {
    if (stream->is_idle()) return {};
    return {cudaErrorNotReady, ""};
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  return on_stream(__func__, handle, [&](Machine& it, const auto& stream) -> Outcome {
    const std::shared_ptr<Event> waited = it.event(event);
    if (waited == nullptr) {
      return {cudaErrorInvalidResourceHandle, show(event) + " is no event"};
    }
    waited->wait_on(*stream);
    return {};
  });
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return on_stream(__func__, handle, [&](Machine&, const auto& stream) -> Outcome {
    if (priority == nullptr) return missing("priority");
    *priority = stream->priority();
    return {};
  });
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  return on_stream(__func__, handle, [&](Machine&, const auto& stream) -> Outcome {
    if (flags == nullptr) return missing("flags");
    *flags = stream->flags();
    return {};
  });
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  return on_stream(__func__, handle, [&](Machine&, const auto& stream) -> Outcome {
    if (device == nullptr) return missing("device");
    *device = stream->device();
    return {};
  });
}

cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  return on_stream(__func__, handle, [&](Machine&, const auto& stream) -> Outcome {
    if (id == nullptr) return missing("streamId");
    *id = reinterpret_cast<std::uintptr_t>(stream->handle());
    return {};
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return on_stream(__func__, handle, [&](Machine&, const auto& stream) -> Outcome {
    if (function == nullptr) return missing("fn");
    stream->enqueue("cudaLaunchHostFunc", [function, data] { function(data); });
    return {};
  });
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback,
                                  void* data, unsigned) {
  return on_stream(__func__, handle, [&](Machine&, const auto& stream) -> Outcome {
    if (callback == nullptr) return missing("callback");
    stream->enqueue("cudaStreamAddCallback",
                    [handle, callback, data] { callback(handle, cudaSuccess, data); });
    return {};
  });
}

cudaError_t cudaStreamAttachMemAsync(cudaStream_t handle, void*, std::size_t,
                                     unsigned) {
  return on_stream(__func__, handle, [](Machine&, const auto&) { return Outcome(); });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return anywhere(__func__, [&]() -> Outcome {
    if (status == nullptr) return missing("pCaptureStatus");
    *status = cudaStreamCaptureStatusNone;
    return {};
  });
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const void** edges, std::size_t* count) {
  return anywhere(__func__, [&]() -> Outcome {
    if (status == nullptr) return missing("captureStatus_out");
    *status = cudaStreamCaptureStatusNone;
    if (id != nullptr) *id = 0;
    if (graph != nullptr) *graph = nullptr;
    if (dependencies != nullptr) *dependencies = nullptr;
    if (edges != nullptr) *edges = nullptr;
    if (count != nullptr) *count = 0;
    return {};
  });
}

// CUDA 12: without edges, and with them.
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream,
                                        cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t* graph,
                                        const cudaGraphNode_t** dependencies,
                                        std::size_t* count) {
  return cudaStreamGetCaptureInfo(stream, status, id, graph, dependencies, nullptr,
                                  count);
}

cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream,
                                        cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t* graph,
                                        const cudaGraphNode_t** dependencies,
                                        const void** edges, std::size_t* count) {
  return cudaStreamGetCaptureInfo(stream, status, id, graph, dependencies, edges,
                                  count);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode of_thread = cudaStreamCaptureModeGlobal;
  return anywhere(__func__, [&]() -> Outcome {
    if (mode == nullptr) return missing("mode");
    std::swap(*mode, of_thread);
    return {};
  });
}

}  // extern "C"
#pragma GCC visibility pop
