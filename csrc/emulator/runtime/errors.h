// Errors as CUDA keeps them: the last one of each thread, and the one that stays with a
// device after a fault.
#pragma once

#include <map>
#include <string>

#include "cuda/abi.h"
#include "outcome.h"
#include "shm/annotations.h"

namespace weightsync::emulator {

// "cudaErrorInvalidValue" and "invalid argument"; "unrecognized error code" and the
// like for what is no error.
const char* error_name(cudaError_t error);
const char* error_words(cudaError_t error);

// Faults of devices, which every later call returns. Thread-safe.
class DeviceFaults {
 public:
  // The first fault of a device stays.
  void set(int device, Outcome fault);
  Outcome of(int device);
  void clear(int device);

 private:
  shm::Mutex mu_;
  std::map<int, Outcome> faults_ WEIGHTSYNC_GUARDED_BY(mu_);
};

// Counts the call. Remembers a failure of `function` for cudaGetLastError() and
// cudaGetErrorString() of this thread, and gives back its code. A success changes
// nothing.
cudaError_t finish(const char* function, const Outcome& outcome);

// The last failure of this thread; take_error() forgets it.
cudaError_t last_error();
cudaError_t take_error();

// The words of an error, and of the last failure of this thread its reason as well.
// Valid until the next failure of this thread.
const char* error_string(cudaError_t error);

}  // namespace weightsync::emulator
