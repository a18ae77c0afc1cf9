// StatusError: a torch-free Status on its way to Python, where module.cpp translates
// it.
#pragma once

#include <exception>
#include <string>
#include <type_traits>
#include <utility>

#include "../shm/status.h"

namespace weightsync {

class StatusError : public std::exception {
 public:
  explicit StatusError(shm::Status status) : status_(std::move(status)) {}
  const char* what() const noexcept override { return status_.message().c_str(); }
  shm::Code code() const { return status_.code(); }

 private:
  shm::Status status_;
};

inline void check(const shm::Status& status) {
  if (!status.ok()) throw StatusError(status);
}

inline void check(bool holds, shm::Code code, const char* message) {
  if (!holds) throw StatusError({code, message});
}

// `message` is called only where the check fails: building it costs more than a copy of
// a small tensor.
template <class Message,
          class = std::enable_if_t<std::is_invocable_r_v<std::string, Message>>>
void check(bool holds, shm::Code code, const Message& message) {
  if (!holds) throw StatusError({code, message()});
}

template <class T>
T unwrap(shm::Result<T> result) {
  check(result.status());
  return result.take();
}

}  // namespace weightsync
