// CUDA runtime: functions of the driver by name. They come from the stand-in driver
// that lies beside this library; what it lacks is a function that answers "not
// supported".
#include <dlfcn.h>

#include "api.h"

namespace weightsync::emulator {
namespace {

using GetProcAddress = int (*)(const char*, void**, int, std::uint64_t, void*);

int not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

// The folder of this library, with its last slash.
std::string own_folder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&not_supported), &info) == 0) return "";
  const std::string path = info.dli_fname;
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

// Beside this library; else in this program (a test), else wherever the loader finds
// it.
GetProcAddress open_driver() {
  constexpr const char* kName = "libcuda.so.1";
  constexpr const char* kFunction = "cuGetProcAddress_v2";
  void* library = ::dlopen((own_folder() + kName).c_str(), RTLD_NOW | RTLD_GLOBAL);
  void* function = ::dlsym(library == nullptr ? RTLD_DEFAULT : library, kFunction);
  if (function == nullptr) {
    library = ::dlopen(kName, RTLD_NOW | RTLD_GLOBAL);
    function = library == nullptr ? nullptr : ::dlsym(library, kFunction);
  }
  if (function == nullptr) {
    complain("cannot open the stand-in driver, " + own_folder() + kName);
  }
  return reinterpret_cast<GetProcAddress>(function);
}

void* driver_function(const char* symbol, unsigned version) {
  static const GetProcAddress get = open_driver();
  void* function = nullptr;
  if (get != nullptr) get(symbol, &function, static_cast<int>(version), 0, nullptr);
  return function != nullptr ? function : reinterpret_cast<void*>(&not_supported);
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                             unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  return anywhere(__func__, [&]() -> Outcome {
    if (symbol == nullptr || function == nullptr) return missing("an argument");
    *function = driver_function(symbol, version);
    if (result != nullptr) *result = cudaDriverEntryPointSuccess;
    return {};
  });
}

cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function,
                                    unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  constexpr unsigned kVersion = 12000;
  return cudaGetDriverEntryPointByVersion(symbol, function, kVersion, flags, result);
}

}  // extern "C"
#pragma GCC visibility pop
