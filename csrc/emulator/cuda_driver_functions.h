// The functions of CUDA's driver that the emulator gives a body, as its callers see
// them.
#pragma once

#include "cuda/abi.h"

extern "C" {

CUresult cuInit(unsigned);
CUresult cuDriverGetVersion(int* version);
CUresult cuDeviceGetCount(int* count);
CUresult cuDeviceGet(CUdevice* device, int ordinal);
CUresult cuDeviceGetName(char* name, int length, CUdevice device);
CUresult cuDeviceGetUuid_v2(cudaUUID_t* uuid, CUdevice device);
CUresult cuDeviceGetUuid(cudaUUID_t* uuid, CUdevice device);
CUresult cuDeviceTotalMem_v2(std::size_t* nbytes, CUdevice device);
CUresult cuDeviceTotalMem(std::size_t* nbytes, CUdevice device);
CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device);
CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device);
CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char* id);
CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer);
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active);
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuDevicePrimaryCtxRelease(CUdevice device);
CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned);
CUresult cuCtxGetCurrent(CUcontext* context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxPushCurrent_v2(CUcontext context);
CUresult cuCtxPushCurrent(CUcontext context);
CUresult cuCtxPopCurrent_v2(CUcontext* context);
CUresult cuCtxPopCurrent(CUcontext* context);
CUresult cuCtxGetDevice(CUdevice* device);
CUresult cuCtxSynchronize();
CUresult cuCtxGetApiVersion(CUcontext, unsigned* version);
CUresult cuGetProcAddress_v2(const char* symbol, void** function, int, std::uint64_t,
                             int* status);
CUresult cuGetProcAddress(const char* symbol, void** function, int version,
                          std::uint64_t flags);
CUresult cuMemGetAllocationGranularity(std::size_t* granularity,
                                       const CUmemAllocationProp* prop, int);
CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t nbytes,
                             std::size_t alignment, CUdeviceptr, unsigned long long);
CUresult cuMemAddressFree(CUdeviceptr address, std::size_t nbytes);
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t nbytes,
                     const CUmemAllocationProp* prop, unsigned long long);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemMap(CUdeviceptr address, std::size_t nbytes, std::size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long);
CUresult cuMemUnmap(CUdeviceptr address, std::size_t nbytes);
CUresult cuMemSetAccess(CUdeviceptr address, std::size_t nbytes,
                        const CUmemAccessDesc* wanted, std::size_t count);
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle,
                                     void* address);
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                CUmemGenericAllocationHandle handle);
CUresult cuMemExportToShareableHandle(void* result, CUmemGenericAllocationHandle handle,
                                      int type, unsigned long long);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle,
                                        void* os_handle, int type);
CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* nbytes,
                                 CUdeviceptr address);
CUresult cuMemGetAddressRange(CUdeviceptr* base, std::size_t* nbytes,
                              CUdeviceptr address);
CUresult cuPointerGetAttribute(void* result, int attribute, CUdeviceptr address);
CUresult cuPointerGetAttributes(unsigned count, const int* attributes, void** results,
                                CUdeviceptr address);
CUresult cuPointerSetAttribute(const void*, int, CUdeviceptr);
CUresult cuStreamWriteValue32_v2(CUstream_st* stream, CUdeviceptr address,
                                 std::uint32_t value, unsigned);
CUresult cuStreamWriteValue64_v2(CUstream_st* stream, CUdeviceptr address,
                                 std::uint64_t value, unsigned);
CUresult cuStreamWaitValue32_v2(CUstream_st* stream, CUdeviceptr address,
                                std::uint32_t value, unsigned flags);
CUresult cuStreamWaitValue64_v2(CUstream_st* stream, CUdeviceptr address,
                                std::uint64_t value, unsigned flags);
CUresult cuStreamWriteValue32(CUstream_st* stream, CUdeviceptr address,
                              std::uint32_t value, unsigned);
CUresult cuStreamWriteValue64(CUstream_st* stream, CUdeviceptr address,
                              std::uint64_t value, unsigned);
CUresult cuStreamWaitValue32(CUstream_st* stream, CUdeviceptr address,
                             std::uint32_t value, unsigned flags);
CUresult cuStreamWaitValue64(CUstream_st* stream, CUdeviceptr address,
                             std::uint64_t value, unsigned flags);
CUresult cuStreamGetCtx(CUstream_st* handle, CUcontext* context);
CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, std::size_t count,
                          CUstream_st* handle);
CUresult cuGetErrorString(CUresult error, const char** text);
CUresult cuGetErrorName(CUresult error, const char** text);

}  // extern "C"
