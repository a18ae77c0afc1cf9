// The functions of CUDA's runtime that the emulator gives a body, as its callers see
// them.
#pragma once

#include "cuda/abi.h"

extern "C" {

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t nbytes,
                       cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t nbytes,
                            cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from,
                         std::size_t from_pitch, std::size_t width, std::size_t height,
                         cudaMemcpyKind kind);
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width,
                              std::size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream);
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from,
                                int from_device, std::size_t nbytes,
                                cudaStream_t handle);
cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device,
                           std::size_t nbytes);
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from,
                                 const std::size_t* sizes, std::size_t count, void*,
                                 std::size_t*, std::size_t, cudaStream_t handle);
cudaError_t cudaMemset(void* to, int value, std::size_t nbytes);
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t nbytes,
                            cudaStream_t stream);
cudaError_t cudaMemset2D(void* to, std::size_t pitch, int value, std::size_t width,
                         std::size_t height);
cudaError_t cudaMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width,
                              std::size_t height, cudaStream_t stream);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaInitDevice(int device, unsigned, unsigned);
cudaError_t cudaDeviceReset();
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device);
cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int device);
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device);
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* id);
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned);
cudaError_t cudaDeviceDisablePeerAccess(int peer);
cudaError_t cudaDeviceGetP2PAttribute(int* value, int attribute, int device, int peer);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaSetDeviceFlags(unsigned flags);
cudaError_t cudaGetDeviceFlags(unsigned* flags);
cudaError_t cudaDeviceGetLimit(std::size_t* value, unsigned limit);
cudaError_t cudaDeviceSetLimit(unsigned limit, std::size_t value);
cudaError_t cudaDeviceGetCacheConfig(int* config);
cudaError_t cudaDeviceSetCacheConfig(int);
cudaError_t cudaCtxResetPersistingL2Cache();
cudaError_t cudaProfilerStart();
cudaError_t cudaProfilerStop();
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                             unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result);
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function,
                                    unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result);
cudaError_t cudaEventCreate(cudaEvent_t* result);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* result, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t handle);
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned);
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t handle);
cudaError_t cudaEventSynchronize(cudaEvent_t handle);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start,
                                 cudaEvent_t end);
cudaError_t cudaEventElapsedTime_v2(float* milliseconds, cudaEvent_t start,
                                    cudaEvent_t end);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* result, void* address);
cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t bytes, unsigned);
cudaError_t cudaIpcCloseMemHandle(void* address);
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* result, cudaEvent_t event);
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* result, cudaIpcEventHandle_t bytes);
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared,
                                       void* stream);
cudaError_t __cudaGetKernel(const void** kernel, const void* function);
cudaError_t __cudaLaunchKernel(const void* kernel, dim3, dim3, void**, std::size_t,
                               cudaStream_t);
cudaError_t __cudaLaunchKernel_ptsz(const void* kernel, dim3, dim3, void**, std::size_t,
                                    cudaStream_t);
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, std::size_t,
                             cudaStream_t);
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**,
                                        std::size_t, cudaStream_t);
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*);
cudaError_t cudaFuncGetName(const char** name, const void* function);
cudaError_t cudaFuncSetAttribute(const void*, int, int);
cudaError_t cudaFuncSetCacheConfig(const void*, int);
cudaError_t cudaKernelSetAttributeForDevice(const void*, int, int, int);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                          std::size_t);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void*, int,
                                                                   std::size_t,
                                                                   unsigned);
cudaError_t cudaMalloc(void** address, std::size_t nbytes);
cudaError_t cudaMallocManaged(void** address, std::size_t nbytes, unsigned);
cudaError_t cudaHostAlloc(void** address, std::size_t nbytes, unsigned);
cudaError_t cudaMallocHost(void** address, std::size_t nbytes);
cudaError_t cudaMallocPitch(void** address, std::size_t* pitch, std::size_t width,
                            std::size_t height);
cudaError_t cudaFree(void* address);
cudaError_t cudaFreeHost(void* address);
cudaError_t cudaMallocAsync(void** address, std::size_t nbytes, cudaStream_t stream);
cudaError_t cudaMallocFromPoolAsync(void** address, std::size_t nbytes, cudaMemPool_t,
                                    cudaStream_t stream);
cudaError_t cudaFreeAsync(void* address, cudaStream_t stream);
cudaError_t cudaHostRegister(void* address, std::size_t nbytes, unsigned);
cudaError_t cudaHostUnregister(void* address);
cudaError_t cudaHostGetDevicePointer(void** result, void* host, unsigned);
cudaError_t cudaHostGetFlags(unsigned* flags, void* host);
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                     const void* address);
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device);
cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device);
cudaError_t cudaDeviceSetMemPool(int, cudaMemPool_t pool);
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* props);
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool);
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, int attribute, void* value);
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, int attribute, void* value);
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t);
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc*,
                                 std::size_t);
cudaError_t cudaMemPoolGetAccess(int* flags, cudaMemPool_t pool, cudaMemLocation*);
cudaError_t cudaDeviceGetGraphMemAttribute(int, int, void* value);
cudaError_t cudaDeviceSetGraphMemAttribute(int, int, void*);
cudaError_t cudaDeviceGraphMemTrim(int);
cudaError_t cudaStreamCreate(cudaStream_t* result);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* result, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* result, unsigned flags,
                                         int priority);
cudaError_t cudaStreamDestroy(cudaStream_t handle);
cudaError_t cudaStreamSynchronize(cudaStream_t handle);
cudaError_t cudaStreamQuery(cudaStream_t handle);
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned);
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority);
cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags);
cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device);
cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id);
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data);
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback,
                                  void* data, unsigned);
cudaError_t cudaStreamAttachMemAsync(cudaStream_t handle, void*, std::size_t, unsigned);
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const void** edges, std::size_t* count);
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream,
                                        cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t* graph,
                                        const cudaGraphNode_t** dependencies,
                                        std::size_t* count);
cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream,
                                        cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t* graph,
                                        const cudaGraphNode_t** dependencies,
                                        const void** edges, std::size_t* count);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);

}  // extern "C"
