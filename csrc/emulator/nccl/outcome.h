// Outcome: a code of NCCL and the text that ncclGetLastError will give for it.
#pragma once

#include <string>
#include <utility>

#include "nccl/abi.h"

namespace weightsync::emulator::nccl {

class [[nodiscard]] Outcome {
 public:
  Outcome() = default;
  // The message says what was asked and what was found; the edge (api.cpp) puts the
  // function's name and "the emulator" before it.
  Outcome(ncclResult_t code, std::string message)
      : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == ncclSuccess; }
  ncclResult_t code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  ncclResult_t code_ = ncclSuccess;
  std::string message_;
};

inline Outcome invalid_argument(std::string message) {
  return {ncclInvalidArgument, std::move(message)};
}

inline Outcome invalid_usage(std::string message) {
  return {ncclInvalidUsage, std::move(message)};
}

}  // namespace weightsync::emulator::nccl
