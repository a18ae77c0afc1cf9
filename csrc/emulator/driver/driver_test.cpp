// The C functions of the driver, as torch and NCCL call them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "emulator/core.h"
#include "emulator/cuda_driver_functions.h"
#include "emulator/cuda_runtime_functions.h"

namespace weightsync::emulator {
namespace {

constexpr std::size_t kPiece = kVmmGranularity;
constexpr CUmemAllocationProp kProp = {1, 1, {1, 0}, nullptr, {}};
constexpr CUmemAccessDesc kAccess = {{1, 0}, 3};

TEST(DriverTest, DevicesAndContextsFollowTheRuntime) {
  CUcontext first = nullptr;
  CUcontext now = nullptr;
  CUdevice device = -1;
  ASSERT_EQ(CUDA_SUCCESS, cuInit(0));
  ASSERT_EQ(CUDA_SUCCESS, cuDevicePrimaryCtxRetain(&first, 2));
  ASSERT_EQ(CUDA_SUCCESS, cuCtxPushCurrent(first));
  ASSERT_EQ(CUDA_SUCCESS, cuCtxGetDevice(&device));
  EXPECT_EQ(2, device);
  EXPECT_EQ(2, current_device());
  ASSERT_EQ(CUDA_SUCCESS, cuCtxPopCurrent(&now));

  EXPECT_EQ(first, now);
  EXPECT_EQ(0, current_device());
  EXPECT_EQ(CUDA_ERROR_INVALID_CONTEXT, cuCtxPopCurrent(&now));
  EXPECT_EQ(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&device, 8));
}

TEST(DriverTest, FunctionsAreFoundByName) {
  void* function = nullptr;
  ASSERT_EQ(cudaSuccess, cudaGetDriverEntryPointByVersion(
                             "cuMemGetAddressRange", &function, 13000, 0, nullptr));
  EXPECT_EQ(reinterpret_cast<void*>(&cuMemGetAddressRange_v2), function);
  ASSERT_EQ(cudaSuccess, cudaGetDriverEntryPointByVersion(
                             "cuTensorMapEncodeTiled", &function, 13000, 0, nullptr));
  ASSERT_NE(nullptr, function);

  EXPECT_EQ(CUDA_ERROR_NOT_SUPPORTED, reinterpret_cast<int (*)()>(function)());
  EXPECT_NE(CUDA_SUCCESS, cuGetProcAddress("cuNoSuchThing", &function, 13000, 0));
}

TEST(DriverTest, MappedMemoryIsMemoryOfItsDevice) {
  CUmemGenericAllocationHandle handle = 0;
  CUmemGenericAllocationHandle again = 0;
  CUdeviceptr address = 0;
  CUdeviceptr base = 0;
  std::size_t nbytes = 0;
  ASSERT_EQ(CUDA_SUCCESS, cuMemCreate(&handle, kPiece, &kProp, 0));
  ASSERT_EQ(CUDA_SUCCESS, cuMemAddressReserve(&address, kPiece, 0, 0, 0));
  ASSERT_EQ(CUDA_SUCCESS, cuMemMap(address, kPiece, 0, handle, 0));
  ASSERT_EQ(CUDA_SUCCESS, cuMemSetAccess(address, kPiece, &kAccess, 1));
  ASSERT_EQ(CUDA_SUCCESS, cuMemRelease(handle));
  void* const memory = reinterpret_cast<void*>(address);
  ASSERT_EQ(cudaSuccess, cudaMemset(memory, 5, kPiece));
  ASSERT_EQ(cudaSuccess, cudaDeviceSynchronize());
  ASSERT_EQ(CUDA_SUCCESS, cuMemRetainAllocationHandle(&again, memory));
  ASSERT_EQ(CUDA_SUCCESS, cuMemGetAddressRange(&base, &nbytes, address + 100));

  EXPECT_EQ(5, static_cast<char*>(memory)[kPiece - 1]);
  EXPECT_EQ(address, base);
  EXPECT_EQ(kPiece, nbytes);
  EXPECT_EQ(kPiece, memory_use(0).used);
  EXPECT_EQ(CUDA_SUCCESS, cuMemRelease(again));
  EXPECT_EQ(CUDA_SUCCESS, cuMemUnmap(address, kPiece));
  EXPECT_EQ(CUDA_SUCCESS, cuMemAddressFree(address, kPiece));
  EXPECT_EQ(0U, memory_use(0).used);
}

TEST(DriverTest, PlainMemoryIsNoVirtualMemory) {
  CUmemGenericAllocationHandle handle = 0;
  void* plain = nullptr;
  const char* words = nullptr;
  ASSERT_EQ(cudaSuccess, cudaMalloc(&plain, 100));

  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuMemRetainAllocationHandle(&handle, plain));
  ASSERT_EQ(CUDA_SUCCESS, cuGetErrorString(CUDA_ERROR_INVALID_VALUE, &words));
  EXPECT_NE(std::string::npos,
            std::string(words).find("weightsync emulator: cuMemRetainAllocationHandle"))
      << words;
  EXPECT_EQ(cudaSuccess, cudaFree(plain));
}

TEST(DriverTest, MemoryOfTheEmulatorHasAHandleToo) {
  CUmemGenericAllocationHandle handle = 0;
  auto made = allocate(0, Kind::kVmm, 100);
  ASSERT_TRUE(made.ok());
  std::byte* const base = made.value().base;

  EXPECT_EQ(kPiece, made.value().nbytes);
  EXPECT_EQ(CUDA_SUCCESS, cuMemRetainAllocationHandle(&handle, base));
  EXPECT_EQ(CUDA_SUCCESS, cuMemRelease(handle));
  EXPECT_TRUE(release(base).ok());
  EXPECT_FALSE(find_allocation(base));
  EXPECT_FALSE(release(base).ok());
  EXPECT_EQ(0U, memory_use(0).used);
}

TEST(DriverTest, AHandleTravelsAsADescriptor) {
  CUmemGenericAllocationHandle handle = 0;
  CUmemGenericAllocationHandle imported = 0;
  int fd = -1;
  ASSERT_EQ(CUDA_SUCCESS, cuMemCreate(&handle, kPiece, &kProp, 0));
  ASSERT_EQ(CUDA_SUCCESS, cuMemExportToShareableHandle(&fd, handle, 1, 0));
  void* const as_pointer = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));

  EXPECT_EQ(CUDA_SUCCESS, cuMemImportFromShareableHandle(&imported, as_pointer, 1));
  EXPECT_EQ(CUDA_ERROR_NOT_SUPPORTED,
            cuMemImportFromShareableHandle(&imported, as_pointer, 8));
  ::close(fd);
  EXPECT_EQ(CUDA_SUCCESS, cuMemRelease(imported));
  EXPECT_EQ(CUDA_SUCCESS, cuMemRelease(handle));
}

TEST(DriverTest, AStreamWaitsForAValueThatAnotherWrites) {
  cudaStream_t first = nullptr;
  cudaStream_t second = nullptr;
  void* word = nullptr;
  ASSERT_EQ(cudaSuccess, cudaMalloc(&word, 8));
  ASSERT_EQ(cudaSuccess, cudaMemset(word, 0, 8));
  ASSERT_EQ(cudaSuccess, cudaDeviceSynchronize());
  ASSERT_EQ(cudaSuccess, cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
  ASSERT_EQ(cudaSuccess, cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
  const auto address = reinterpret_cast<CUdeviceptr>(word);
  ASSERT_EQ(CUDA_SUCCESS, cuStreamWaitValue64(first, address, 2, 0));
  ASSERT_EQ(CUDA_SUCCESS, cuStreamWriteValue64(second, address, 1, 0));
  ASSERT_EQ(cudaSuccess, cudaStreamSynchronize(second));
  EXPECT_EQ(cudaErrorNotReady, cudaStreamQuery(first));
  ASSERT_EQ(CUDA_SUCCESS, cuStreamWriteValue64(second, address, 2, 0));

  EXPECT_EQ(cudaSuccess, cudaStreamSynchronize(first));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuStreamWaitValue64(first, address + 4, 2, 0));
  EXPECT_EQ(cudaSuccess, cudaStreamDestroy(first));
  EXPECT_EQ(cudaSuccess, cudaStreamDestroy(second));
  EXPECT_EQ(cudaSuccess, cudaFree(word));
}

TEST(DriverTest, PointersHaveAttributes) {
  void* memory = nullptr;
  int device = -1;
  unsigned type = 0;
  ASSERT_EQ(cudaSuccess, cudaMalloc(&memory, 8));
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  ASSERT_EQ(CUDA_SUCCESS, cuPointerGetAttribute(&device, 9, address));
  ASSERT_EQ(CUDA_SUCCESS, cuPointerGetAttribute(&type, 2, address));

  EXPECT_EQ(0, device);
  EXPECT_EQ(2U, type);
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&type, 999, address));
  EXPECT_EQ(cudaSuccess, cudaFree(memory));
}

}  // namespace
}  // namespace weightsync::emulator
