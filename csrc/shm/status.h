// Status and Result: an error as a value, for everything that does not know torch.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

namespace weightsync::shm {

// Mirrors the Python exception tree; module.cpp translates one into the other.
enum class Code : std::uint8_t {
  kOk,
  kInvalid,      // what was asked does not fit            -> PlanError
  kClosed,       // closed or aborted on this side         -> ClosedError
  kPeer,         // the other side died or left            -> PeerError
  kTimedOut,     // the deadline passed                    -> TimedOutError
  kUnsupported,  // the platform cannot do it              -> UnsupportedError
  kCancelled,    // the caller gave the operation up       -> ClosedError
  kSystem,       // a system call failed                   -> WeightSyncError
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// A system call's failure: what was attempted, and errno in words.
inline Status system_error(const std::string& attempted, int error) {
  return {Code::kSystem, "cannot " + attempted + ": " + std::strerror(error)};
}

// A value, or the reason why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  // Ask ok() before.
  // The caller has asked ok() first.
  T& value() { return *value_; }           // NOLINT(bugprone-unchecked-optional-access)
  T take() { return std::move(*value_); }  // NOLINT(bugprone-unchecked-optional-access)

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace weightsync::shm
