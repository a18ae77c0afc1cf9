// CUDA runtime: what the emulator does not do. Each answers cudaErrorNotSupported and
// says which function it was. They take no arguments: whatever a caller passes is
// ignored, as the C calling conventions of Linux allow.
#include "api.h"

namespace weightsync::emulator {
namespace {

cudaError_t unsupported(const char* function) {
  return finish(function, {cudaErrorNotSupported,
                           "the emulator has no kernels, graphs, capture, arrays or "
                           "device symbols"});
}

}  // namespace
}  // namespace weightsync::emulator

#define WEIGHTSYNC_UNSUPPORTED(each)                                                       \
  each(cudaChooseDevice) each(cudaDeviceFlushGPUDirectRDMAWrites) each(                    \
      cudaFreeArray) each(cudaGetExportTable) each(cudaGetFuncBySymbol)                    \
      each(cudaGetSymbolAddress) each(cudaGetSymbolSize) each(cudaGraphAddNode) each(      \
          cudaGraphConditionalHandleCreate) each(cudaGraphCreate)                          \
          each(cudaGraphDebugDotPrint) each(cudaGraphDestroy) each(                        \
              cudaGraphExecDestroy) each(cudaGraphExecUpdate) each(cudaGraphGetNodes)      \
              each(cudaGraphInstantiate) each(cudaGraphInstantiateWithFlags) each(         \
                  cudaGraphInstantiateWithParams) each(cudaGraphLaunch)                    \
                  each(cudaGraphNodeGetDependencies) each(cudaGraphRetainUserObject) each( \
                      cudaGraphUpload) each(cudaLibraryGetGlobal)                          \
                      each(cudaLibraryGetKernel) each(cudaLibraryGetKernelCount) each(     \
                          cudaLibraryGetManaged) each(cudaLibraryGetUnifiedFunction)       \
                          each(cudaLibraryLoadData) each(cudaLibraryLoadFromFile) each(    \
                              cudaLibraryUnload) each(cudaMalloc3D) each(cudaMallocArray)  \
                              each(cudaMemAdvise) each(cudaMemPrefetchAsync) each(         \
                                  cudaMemRangeGetAttribute) each(cudaMemcpy3DAsync)        \
                                  each(cudaMemcpyFromSymbol) each(                         \
                                      cudaMemcpyToSymbol) each(cudaMemcpyToSymbolAsync)    \
                                      each(cudaSetValidDevices) each(                      \
                                          cudaStreamBeginCapture)                          \
                                          each(cudaStreamBeginCaptureToGraph) each(        \
                                              cudaStreamCopyAttributes)                    \
                                              each(cudaStreamEndCapture) each(             \
                                                  cudaStreamGetAttribute)                  \
                                                  each(cudaStreamSetAttribute) each(       \
                                                      cudaStreamUpdateCaptureDependencies) \
                                                      each(cudaUserObjectCreate) each(     \
                                                          cudaUserObjectRelease)           \
                                                          each(cudaUserObjectRetain)

#define WEIGHTSYNC_DEFINE(name) \
  cudaError_t name() { return weightsync::emulator::unsupported(#name); }

#pragma GCC visibility push(default)
extern "C" {
WEIGHTSYNC_UNSUPPORTED(WEIGHTSYNC_DEFINE)
}
#pragma GCC visibility pop
