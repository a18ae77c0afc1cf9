// Failures of the driver's functions: their codes, and the reason of the last one of
// the calling thread for cuGetErrorString().
#pragma once

#include <string>

#include "emulator/cuda_driver_functions.h"
#include "shm/status.h"

namespace weightsync::emulator {

// Remembers why `function` fails, and gives back the code.
CUresult fail(const char* function, CUresult code, const std::string& reason);

// Counts a call; the code with which a fault asks it to fail before it does anything,
// and success for the others.
CUresult begin(const char* function);

// kInvalid: CUDA_ERROR_INVALID_VALUE; else out of memory. Success for ok.
CUresult answer(const char* function, const shm::Status& status);

// The code that fits a device that is asked for; success if there is one.
CUresult check_driver_device(const char* function, int device);

}  // namespace weightsync::emulator
