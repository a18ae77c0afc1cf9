// Registrations: the buffers given to ncclCommRegister, counted. A plain value; its
// owner locks.
//
// A buffer that lies within a registered one gets that one's handle, once more, as in
// NCCL; whoever registers twice deregisters twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace weightsync::emulator::nccl {

class Registrations {
 public:
  // A handle: never null, never used twice.
  void* add(const void* buffer, std::size_t nbytes);
  // False if the handle is unknown, or was given back as often as it was got.
  bool remove(void* handle);
  std::size_t size() const { return live_.size(); }

 private:
  struct Registered {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    std::size_t count = 0;
  };
  std::map<std::uintptr_t, Registered> live_;  // by handle
  std::uintptr_t last_ = 0;
};

}  // namespace weightsync::emulator::nccl
