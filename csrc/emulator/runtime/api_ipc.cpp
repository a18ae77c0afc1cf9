// CUDA runtime: memory and events of other processes.
#include <unistd.h>

#include <cstring>

#include "api.h"
#include "ipc.h"

namespace weightsync::emulator {
namespace {

Ipc& ipc() {
  static auto* const of_process = new Ipc();
  return *of_process;
}

template <class Bytes>
void write_handle(const IpcHandle& handle, Bytes& bytes) {
  std::memset(bytes.reserved, 0, sizeof bytes.reserved);
  std::memcpy(bytes.reserved, &handle, sizeof handle);
}

// What the bytes say, if another process wrote them with this magic.
template <class Bytes>
Outcome read_handle(const Bytes& bytes, std::uint64_t magic, IpcHandle& handle) {
  std::memcpy(&handle, bytes.reserved, sizeof handle);
  if (handle.magic != magic || handle.nbytes > handle.locator.nbytes) {
    return invalid("the handle is none of the emulator");
  }
  if (handle.locator.pid != ::getpid()) return {};
  return {cudaErrorDeviceUninitialized,
          "a handle cannot be opened in the process that made it"};
}

// The device that a process knows by another number; the current one if it cannot see
// it.
int local_device(Machine& it, int physical) {
  for (int device = 0; device < it.devices(); ++device) {
    if (it.physical(device) == physical) return device;
  }
  return chosen_device();
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* result, void* address) {
  return on_device(__func__, [&](Machine& it, int) -> Outcome {
    const auto found = it.memory().find(address);
    if (result == nullptr || !found || found->kind != Kind::kMalloc) {
      return invalid(show(address) + " is not in memory of cudaMalloc");
    }
    IpcHandle handle;
    handle.magic = kIpcMemory;
    handle.locator = found->segment->locator();
    handle.nbytes = found->nbytes;
    handle.physical_device = it.physical(found->device);
    write_handle(handle, *result);
    return {};
  });
}

cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t bytes, unsigned) {
  return on_device(__func__, [&](Machine& it, int) -> Outcome {
    if (address == nullptr) return missing("devPtr");
    IpcHandle handle;
    Outcome read = read_handle(bytes, kIpcMemory, handle);
    if (!read.ok()) return read;
    const int device = local_device(it, handle.physical_device);
    return ipc().open(it.memory(), handle, device, address);
  });
}

cudaError_t cudaIpcCloseMemHandle(void* address) {
  return on_device(__func__, [&](Machine& it, int) {
    for (int device = 0; device < it.devices(); ++device) {
      it.streams().synchronize(device);
    }
    return ipc().close(it.memory(), address);
  });
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* result, cudaEvent_t event) {
  return on_event(__func__, event, [&](Machine& it, Event& found) -> Outcome {
    if (result == nullptr) return missing("handle");
    if ((found.flags() & cudaEventInterprocess) == 0 || !found.is_ours()) {
      return {cudaErrorInvalidResourceHandle,
              "the event is not interprocess, or of another process"};
    }
    IpcHandle handle;
    handle.magic = kIpcEvent;
    handle.locator = found.locator();
    handle.physical_device = it.physical(found.device());
    write_handle(handle, *result);
    return {};
  });
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* result, cudaIpcEventHandle_t bytes) {
  return on_device(__func__, [&](Machine& it, int) -> Outcome {
    if (result == nullptr) return missing("event");
    IpcHandle handle;
    Outcome read = read_handle(bytes, kIpcEvent, handle);
    if (!read.ok()) return read;
    auto opened = Event::open(local_device(it, handle.physical_device), handle.locator);
    if (!opened.ok()) {
      return {cudaErrorInvalidResourceHandle, opened.status().message()};
    }
    *result = it.add(opened.take());
    return {};
  });
}

}  // extern "C"
#pragma GCC visibility pop
