// Kernels: the names of the kernels that CUDA objects register when they are loaded, so
// that a launch can say which one it was. About a hundred thousand are registered while
// torch is imported: registering only appends. Thread-safe.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/abi.h"
#include "outcome.h"
#include "shm/annotations.h"

namespace weightsync::emulator {

class Kernels {
 public:
  // The kernels of one object; its address is the handle that the object gets.
  struct Module {
    std::vector<std::pair<const void*, const char*>> kernels;
  };

  Module* add_module();
  void remove_module(Module* module);
  void add(Module* module, const void* function, const char* name);

  // The name of the kernel behind a host function, in C++.
  std::string name_of(const void* function);
  // Why a launch of it fails; said on stderr too, once for each kernel.
  Outcome refuse(const void* function);

 private:
  shm::Mutex mu_;
  std::vector<std::unique_ptr<Module>> modules_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::set<std::string> refused_ WEIGHTSYNC_GUARDED_BY(mu_);
};

}  // namespace weightsync::emulator
