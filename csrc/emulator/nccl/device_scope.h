// DeviceScope: another current device for as long as it lives.
#pragma once

#include "emulator/core.h"

namespace weightsync::emulator::nccl {

class DeviceScope {
 public:
  explicit DeviceScope(int device)
      : before_(current_device()), changed_(device != before_) {
    if (changed_) (void)set_current_device(device).ok();
  }
  ~DeviceScope() {
    if (changed_) (void)set_current_device(before_).ok();
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const int before_;
  const bool changed_;
};

}  // namespace weightsync::emulator::nccl
