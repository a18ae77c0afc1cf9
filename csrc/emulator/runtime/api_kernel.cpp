// CUDA runtime: kernels register themselves and can be asked about, but do not run.
#include <vector>

#include "api.h"

namespace weightsync::emulator {
namespace {

// What <<<>>> leaves for the function that launches.
struct LaunchShape {
  dim3 grid;
  dim3 block;
  std::size_t shared;
  cudaStream_t stream;
};

std::vector<LaunchShape>& pushed() {
  thread_local std::vector<LaunchShape> shapes;
  return shapes;
}

cudaError_t refuse(const char* function, const void* kernel) {
  return finish(function, kernels().refuse(kernel));
}

Kernels::Module* module_of(void** handle) {
  return reinterpret_cast<Kernels::Module*>(handle);
}

cudaError_t occupancy(const char* function, int* blocks) {
  if (blocks == nullptr) return finish(function, missing("numBlocks"));
  *blocks = 1;
  return cudaSuccess;
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

void** __cudaRegisterFatBinary(void*) {
  return reinterpret_cast<void**>(kernels().add_module());
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void** handle) {
  kernels().remove_module(module_of(handle));
}

void __cudaRegisterFunction(void** handle, const char* host_function, char*,
                            const char* device_name, int, void*, void*, void*, void*,
                            int*) {
  kernels().add(module_of(handle), host_function, device_name);
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}

void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, std::size_t, int,
                              int) {}

char __cudaInitModule(void**) { return 1; }

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared,
                                     cudaStream_t stream) {
  pushed().push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared,
                                       void* stream) {
  if (pushed().empty()) {
    return finish(__func__, {cudaErrorMissingConfiguration, "no launch has begun"});
  }
  const LaunchShape shape = pushed().back();
  pushed().pop_back();
  *grid = shape.grid;
  *block = shape.block;
  *shared = shape.shared;
  *static_cast<cudaStream_t*>(stream) = shape.stream;
  return cudaSuccess;
}

// A kernel's handle is its host function.
cudaError_t __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(const void* kernel, dim3, dim3, void**, std::size_t,
                               cudaStream_t) {
  return refuse("a launch", kernel);
}

cudaError_t __cudaLaunchKernel_ptsz(const void* kernel, dim3, dim3, void**, std::size_t,
                                    cudaStream_t) {
  return refuse("a launch", kernel);
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, std::size_t,
                             cudaStream_t) {
  return refuse(__func__, kernel);
}

cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**,
                                        std::size_t, cudaStream_t) {
  return refuse(__func__, kernel);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  return refuse(__func__, kernel);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  if (attributes == nullptr) return finish(__func__, missing("attr"));
  constexpr int kCapability = 90;
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = kCapability;
  attributes->binaryVersion = kCapability;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

cudaError_t cudaFuncGetName(const char** name, const void* function) {
  if (name == nullptr) return finish(__func__, missing("name"));
  thread_local std::string of_kernel;
  of_kernel = kernels().name_of(function);
  *name = of_kernel.c_str();
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }
cudaError_t cudaFuncSetCacheConfig(const void*, int) { return cudaSuccess; }

cudaError_t cudaKernelSetAttributeForDevice(const void*, int, int, int) {
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                          std::size_t) {
  return occupancy(__func__, blocks);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void*, int,
                                                                   std::size_t,
                                                                   unsigned) {
  return occupancy(__func__, blocks);
}

}  // extern "C"
#pragma GCC visibility pop
