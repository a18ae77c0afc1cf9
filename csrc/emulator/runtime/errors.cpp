#include "errors.h"

#include <cinttypes>
#include <cstdio>
#include <utility>

#include "emulator/core.h"

namespace weightsync::emulator {
namespace {

struct Words {
  cudaError_t error;
  const char* name;
  const char* words;
};

// In CUDA's own words, so that what torch's users search for is found.
constexpr Words kWords[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError",
     "initialization error"},
    {cudaErrorInvalidPitchValue, "cudaErrorInvalidPitchValue",
     "invalid pitch argument"},
    {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection",
     "invalid copy direction for memcpy"},
    {cudaErrorMissingConfiguration, "cudaErrorMissingConfiguration",
     "__global__ function call is not configured"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction",
     "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized",
     "invalid device context"},
    {cudaErrorAlreadyMapped, "cudaErrorAlreadyMapped", "resource already mapped"},
    {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported",
     "peer access is not supported between these two devices"},
    {cudaErrorOperatingSystem, "cudaErrorOperatingSystem",
     "OS call failed or operation not supported on this OS"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle",
     "invalid resource handle"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled",
     "peer access is already enabled"},
    {cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled",
     "peer access has not been enabled"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const Words* find_words(cudaError_t error) {
  for (const Words& words : kWords) {
    if (words.error == error) return &words;
  }
  return nullptr;
}

// What a thread remembers of its failures.
struct Remembered {
  cudaError_t last = cudaSuccess;
  cudaError_t described = cudaSuccess;  // whose description `text` is
  std::string text;
};

Remembered& remembered() {
  thread_local Remembered failure;
  return failure;
}

}  // namespace

std::string show(const void* address) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%" PRIxPTR,
                reinterpret_cast<std::uintptr_t>(address));
  return text;
}

const char* error_name(cudaError_t error) {
  const Words* const words = find_words(error);
  return words == nullptr ? "unrecognized error code" : words->name;
}

const char* error_words(cudaError_t error) {
  const Words* const words = find_words(error);
  return words == nullptr ? "unrecognized error code" : words->words;
}

void DeviceFaults::set(int device, Outcome fault) {
  const shm::MutexLock lock(mu_);
  faults_.emplace(device, std::move(fault));
}

Outcome DeviceFaults::of(int device) {
  const shm::MutexLock lock(mu_);
  const auto found = faults_.find(device);
  return found == faults_.end() ? Outcome() : found->second;
}

void DeviceFaults::clear(int device) {
  const shm::MutexLock lock(mu_);
  faults_.erase(device);
}

cudaError_t finish(const char* function, const Outcome& outcome) {
  count_call(function);
  if (outcome.ok()) return cudaSuccess;
  Remembered& failure = remembered();
  failure.last = outcome.error();
  failure.described = cudaSuccess;
  if (!outcome.reason().empty()) {
    failure.described = outcome.error();
    failure.text = std::string(error_words(outcome.error())) +
                   " (weightsync emulator: " + function + ": " + outcome.reason() + ")";
  }
  return outcome.error();
}

cudaError_t last_error() { return remembered().last; }

cudaError_t take_error() { return std::exchange(remembered().last, cudaSuccess); }

const char* error_string(cudaError_t error) {
  const Remembered& failure = remembered();
  const bool described = error != cudaSuccess && failure.described == error;
  return described ? failure.text.c_str() : error_words(error);
}

}  // namespace weightsync::emulator
