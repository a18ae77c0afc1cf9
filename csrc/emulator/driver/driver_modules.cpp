// CUDA driver: modules of code that is compiled at run time, and their kernels. None of
// them can run, so loading one is refused, with a reason.
#include "emulator/core.h"
#include "failure.h"

namespace weightsync::emulator {
namespace {

CUresult no_kernels(const char* function) {
  count_call(function);
  return fail(function, CUDA_ERROR_NOT_SUPPORTED,
              "kernels do not run on the emulator, compiled at run time or before");
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

// NVIDIA's own libraries ask for tables of functions that are not documented.
CUresult cuGetExportTable(const void** table, const void*) {
  if (table != nullptr) *table = nullptr;
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuModuleLoad(void**, const char*) { return no_kernels(__func__); }
CUresult cuModuleLoadData(void**, const void*) { return no_kernels(__func__); }
CUresult cuModuleLoadDataEx(void**, const void*, unsigned, int*, void**) {
  return no_kernels(__func__);
}
CUresult cuModuleUnload(void*) { return no_kernels(__func__); }
CUresult cuModuleGetFunction(void**, void*, const char*) {
  return no_kernels(__func__);
}
CUresult cuLinkCreate_v2(unsigned, int*, void**, void**) {
  return no_kernels(__func__);
}
CUresult cuLinkAddData_v2(void*, int, void*, std::size_t, const char*, unsigned, int*,
                          void**) {
  return no_kernels(__func__);
}
CUresult cuLinkComplete(void*, void**, std::size_t*) { return no_kernels(__func__); }
CUresult cuFuncGetAttribute(int*, int, void*) { return no_kernels(__func__); }
CUresult cuFuncSetAttribute(void*, int, int) { return no_kernels(__func__); }
CUresult cuFuncSetCacheConfig(void*, int) { return no_kernels(__func__); }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int*, void*, int, std::size_t) {
  return no_kernels(__func__);
}
CUresult cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, CUstream_st*, void**, void**) {
  return no_kernels(__func__);
}
CUresult cuLaunchCooperativeKernel(void*, unsigned, unsigned, unsigned, unsigned,
                                   unsigned, unsigned, unsigned, CUstream_st*, void**) {
  return no_kernels(__func__);
}
CUresult cuTensorMapEncodeTiled(void*, int, unsigned, void*, const std::uint64_t*,
                                const std::uint64_t*, const unsigned*, const unsigned*,
                                int, int, int, int) {
  return no_kernels(__func__);
}

}  // extern "C"
#pragma GCC visibility pop
