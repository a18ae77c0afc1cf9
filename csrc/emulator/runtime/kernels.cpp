#include "kernels.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>

#include "emulator/core.h"

namespace weightsync::emulator {
namespace {

using shm::MutexLock;

std::string demangle(const char* name) {
  int status = 0;
  char* const words = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string demangled = status == 0 ? words : name;
  std::free(words);  // NOLINT: the interface of the demangler
  return demangled;
}

}  // namespace

Kernels::Module* Kernels::add_module() {
  const MutexLock lock(mu_);
  modules_.push_back(std::make_unique<Module>());
  return modules_.back().get();
}

void Kernels::remove_module(Module* module) {
  const MutexLock lock(mu_);
  const auto is_it = [module](const auto& each) { return each.get() == module; };
  const auto found = std::find_if(modules_.begin(), modules_.end(), is_it);
  if (found != modules_.end()) modules_.erase(found);
}

void Kernels::add(Module* module, const void* function, const char* name) {
  const MutexLock lock(mu_);
  module->kernels.emplace_back(function, name);
}

std::string Kernels::name_of(const void* function) {
  const MutexLock lock(mu_);
  for (const auto& module : modules_) {
    for (const auto& [known, name] : module->kernels) {
      if (known == function) return demangle(name);
    }
  }
  return "unknown, registered by nobody, at " + show(function);
}

Outcome Kernels::refuse(const void* function) {
  const std::string name = name_of(function);
  const std::string reason =
      "there is no GPU, so kernels cannot run; copies and memsets can. The kernel is " +
      name;
  bool is_new = false;
  {
    const MutexLock lock(mu_);
    is_new = refused_.insert(name).second;
  }
  if (is_new) complain("a kernel was launched: " + reason);
  return {cudaErrorNotSupported, reason};
}

}  // namespace weightsync::emulator
