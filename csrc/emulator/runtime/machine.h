// Machine: the emulated GPUs of this process, and everything on them.
//
// There is one, made at first use and never destroyed: the C ABI has no place to keep
// another, and threads of streams may outlive main(). A forked child must not use the
// machine of its parent, as with CUDA, but gets its own if the parent's was never used.
#pragma once

#include <array>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "configuration.h"
#include "errors.h"
#include "event.h"
#include "kernels.h"
#include "memory.h"
#include "shm/annotations.h"
#include "shm/owned_thread.h"
#include "streams.h"
#include "vmm.h"

namespace weightsync::emulator {

class Machine {
 public:
  explicit Machine(Configuration configuration);

  int devices() const { return static_cast<int>(configuration_.devices.size()); }
  int physical(int device) const { return configuration_.devices[device]; }
  bool has(int device) const { return device >= 0 && device < devices(); }
  // What a call about a device answers before anything else.
  Outcome check(int device);
  // Why a fork of a process that used the machine cannot; ok elsewhere.
  Outcome check_process() const;

  Memory& memory() { return memory_; }
  Vmm& vmm() { return vmm_; }
  Streams& streams() { return streams_; }
  DeviceFaults& faults() { return faults_; }

  // VMM memory with an address, as ncclMemAlloc gives it.
  shm::Result<Allocation> allocate_vmm(int device, std::size_t nbytes);
  // False: the address is none of allocate_vmm().
  bool release_vmm(void* base);

  cudaEvent_t add(std::shared_ptr<Event> event);
  std::shared_ptr<Event> event(cudaEvent_t handle);
  bool remove(cudaEvent_t handle);

  bool can_access(int device, int peer);
  // False: it was so already.
  bool set_access(int device, int peer, bool enabled);

  // Frees everything a device holds, after its streams.
  void reset(int device);

 private:
  // Constant after construction.
  const Configuration configuration_;
  const shm::Origin origin_;

  // With locks of their own.
  Memory memory_;
  Vmm vmm_;
  DeviceFaults faults_;
  Streams streams_;

  shm::Mutex mu_;
  std::unordered_map<cudaEvent_t, std::shared_ptr<Event>> events_
      WEIGHTSYNC_GUARDED_BY(mu_);
  std::set<std::pair<int, int>> access_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::set<void*> vmm_bases_ WEIGHTSYNC_GUARDED_BY(mu_);
};

// The machine of this process.
Machine& machine();

// The kernels of this process: registered before anybody asks for the machine.
Kernels& kernels();

// The current device of the calling thread, and that machine() has it.
int chosen_device();
Outcome choose_device(int device);

}  // namespace weightsync::emulator
