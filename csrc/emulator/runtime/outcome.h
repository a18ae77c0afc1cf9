// Outcome: success, or a cudaError_t with its reason; what everything in the runtime
// returns to the functions of the C ABI.
#pragma once

#include <string>
#include <utility>

#include "cuda/abi.h"
#include "shm/status.h"

namespace weightsync::emulator {

class [[nodiscard]] Outcome {
 public:
  Outcome() = default;
  Outcome(cudaError_t error, std::string reason)
      : error_(error), reason_(std::move(reason)) {}

  bool ok() const { return error_ == cudaSuccess; }
  cudaError_t error() const { return error_; }
  const std::string& reason() const { return reason_; }

 private:
  cudaError_t error_ = cudaSuccess;
  std::string reason_;
};

inline Outcome invalid(std::string reason) {
  return {cudaErrorInvalidValue, std::move(reason)};
}

// What the machine says of a request: out of memory and the like are kSystem.
inline Outcome outcome_of(const shm::Status& status) {
  if (status.ok()) return {};
  const bool wrong = status.code() == shm::Code::kInvalid;
  return {wrong ? cudaErrorInvalidValue : cudaErrorMemoryAllocation, status.message()};
}

// "0x7f..." for messages.
std::string show(const void* address);

}  // namespace weightsync::emulator
