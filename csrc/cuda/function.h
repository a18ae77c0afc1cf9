// Function: a C function of a library that is found at run time, or not.
#pragma once

#include <dlfcn.h>

#include <type_traits>

namespace weightsync {

// What a call returns whose function the library lacks, unless that is a pointer. No
// library has this code.
inline constexpr int kMissingFunction = 0x5757;

template <class Signature>
class Function;

// Immutable once found, so any thread may call it.
template <class Returned, class... Arguments>
class Function<Returned(Arguments...)> {
 public:
  explicit Function(const char* name) : name_(name) {}

  void find(void* library) {
    pointer_ = reinterpret_cast<Returned (*)(Arguments...)>(::dlsym(library, name_));
  }
  // For what is found by other means.
  void take(void* pointer) {
    pointer_ = reinterpret_cast<Returned (*)(Arguments...)>(pointer);
  }
  bool exists() const { return pointer_ != nullptr; }
  const char* name() const { return name_; }

  Returned operator()(Arguments... arguments) const {
    if (pointer_ != nullptr) return pointer_(arguments...);
    if constexpr (std::is_pointer_v<Returned>) {
      return nullptr;
    } else {
      return static_cast<Returned>(kMissingFunction);
    }
  }

 private:
  const char* const name_;
  Returned (*pointer_)(Arguments...) = nullptr;
};

}  // namespace weightsync
