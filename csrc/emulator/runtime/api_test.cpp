// The C functions of the runtime, as a program calls them.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "emulator/core.h"
#include "emulator/cuda_runtime_functions.h"

namespace weightsync::emulator {
namespace {

constexpr std::size_t kBytes = 4096;

class ApiTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(cudaSuccess, cudaSetDevice(0));
    ASSERT_EQ(cudaSuccess, cudaMalloc(&device_, kBytes));
    ASSERT_EQ(cudaSuccess, cudaMallocHost(&pinned_, kBytes));
    ASSERT_EQ(cudaSuccess, cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    (void)cudaGetLastError();
  }
  void TearDown() override {
    gate_ = true;
    EXPECT_EQ(cudaSuccess, cudaStreamSynchronize(stream_));
    EXPECT_EQ(cudaSuccess, cudaStreamDestroy(stream_));
    EXPECT_EQ(cudaSuccess, cudaFree(device_));
    EXPECT_EQ(cudaSuccess, cudaFreeHost(pinned_));
    EXPECT_EQ(0U, memory_use(0).used);
  }

  // Holds the stream until gate_ is set.
  void block() {
    const auto wait = [](void* gate) {
      while (!*static_cast<std::atomic<bool>*>(gate)) std::this_thread::yield();
    };
    ASSERT_EQ(cudaSuccess, cudaLaunchHostFunc(stream_, wait, &gate_));
  }

  std::atomic<bool> gate_{false};
  std::vector<char> host_ = std::vector<char>(kBytes, 'h');
  void* device_ = nullptr;
  void* pinned_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

TEST_F(ApiTest, ThereAreEightDevicesOfOneKind) {
  int count = 0;
  cudaDeviceProp prop{};
  size_t free = 0;
  size_t total = 0;
  ASSERT_EQ(cudaSuccess, cudaGetDeviceCount(&count));
  ASSERT_EQ(cudaSuccess, cudaGetDeviceProperties(&prop, 7));
  ASSERT_EQ(cudaSuccess, cudaMemGetInfo(&free, &total));

  EXPECT_EQ(8, count);
  EXPECT_STREQ("weightsync emulated GPU", prop.name);
  EXPECT_EQ(9, prop.major);
  EXPECT_EQ(total, prop.totalGlobalMem);
  EXPECT_EQ(kBytes, total - free);
}

TEST_F(ApiTest, AWrongDeviceIsAnError) {
  int value = 0;
  cudaDeviceProp prop{};

  EXPECT_EQ(cudaErrorInvalidDevice, cudaSetDevice(8));
  EXPECT_EQ(cudaErrorInvalidDevice, cudaSetDevice(-1));
  EXPECT_EQ(cudaErrorInvalidDevice, cudaGetDeviceProperties(&prop, 8));
  EXPECT_EQ(cudaErrorInvalidDevice, cudaDeviceCanAccessPeer(&value, 0, 9));
  EXPECT_EQ(cudaErrorInvalidDevice, cudaDeviceEnablePeerAccess(9, 0));
  EXPECT_EQ(cudaSuccess, cudaGetDevice(&value));
  EXPECT_EQ(0, value);
}

TEST_F(ApiTest, BytesComeBackAsTheyWent) {
  std::vector<char> back(kBytes);
  ASSERT_EQ(cudaSuccess,
            cudaMemcpy(device_, host_.data(), kBytes, cudaMemcpyHostToDevice));
  ASSERT_EQ(cudaSuccess, cudaMemset(static_cast<char*>(device_) + 10, 'x', 5));
  ASSERT_EQ(cudaSuccess,
            cudaMemcpy(back.data(), device_, kBytes, cudaMemcpyDeviceToHost));

  EXPECT_EQ("hhxxxxxhh", std::string(back.begin() + 8, back.begin() + 17));
}

TEST_F(ApiTest, PinnedMemoryIsReadWhenTheStreamComesToIt) {
  block();
  std::memset(pinned_, 'a', kBytes);
  ASSERT_EQ(cudaSuccess,
            cudaMemcpyAsync(device_, pinned_, kBytes, cudaMemcpyHostToDevice, stream_));
  EXPECT_EQ(cudaErrorNotReady, cudaStreamQuery(stream_));
  std::memset(pinned_, 'b', kBytes);
  gate_ = true;
  ASSERT_EQ(cudaSuccess, cudaStreamSynchronize(stream_));

  EXPECT_EQ('b', static_cast<char*>(device_)[17]);
}

TEST_F(ApiTest, PageableMemoryIsReadBeforeTheCallReturns) {
  block();
  ASSERT_EQ(cudaSuccess, cudaMemcpyAsync(device_, host_.data(), kBytes,
                                         cudaMemcpyHostToDevice, stream_));
  std::fill(host_.begin(), host_.end(), 'z');
  gate_ = true;
  ASSERT_EQ(cudaSuccess, cudaStreamSynchronize(stream_));

  EXPECT_EQ('h', static_cast<char*>(device_)[17]);
}

TEST_F(ApiTest, AHostPointerIsNoDevicePointer) {
  EXPECT_EQ(cudaErrorInvalidValue,
            cudaMemcpy(host_.data(), host_.data() + 8, 8, cudaMemcpyDeviceToDevice));
  EXPECT_NE(std::string::npos, std::string(cudaGetErrorString(cudaErrorInvalidValue))
                                   .find("pageable host memory"));
  EXPECT_EQ(cudaErrorInvalidValue,
            cudaMemcpy(device_, device_, 8, cudaMemcpyHostToDevice));
  EXPECT_EQ(cudaErrorInvalidValue, cudaMemset(host_.data(), 0, 8));
  EXPECT_EQ(cudaErrorInvalidValue, cudaFree(host_.data()));
  EXPECT_EQ(cudaErrorInvalidValue, cudaFree(pinned_));
  EXPECT_EQ(cudaErrorInvalidValue, cudaFreeHost(device_));
}

TEST_F(ApiTest, ARangeThatLeavesItsAllocationIsAnError) {
  EXPECT_EQ(cudaErrorInvalidValue,
            cudaMemcpy(device_, host_.data(), kBytes + 1, cudaMemcpyHostToDevice));
  const std::string words = cudaGetErrorString(cudaErrorInvalidValue);
  EXPECT_NE(std::string::npos,
            words.find("weightsync emulator: cudaMemcpy: 4097 bytes"))
      << words;
  EXPECT_EQ(cudaErrorInvalidValue,
            cudaMemset(static_cast<char*>(device_) + 1, 0, kBytes));
}

TEST_F(ApiTest, RowsAreCopiedWithTheirPitches) {
  ASSERT_EQ(cudaSuccess, cudaMemset2D(device_, 16, '.', 16, 4));
  ASSERT_EQ(cudaSuccess,
            cudaMemcpy2D(device_, 16, host_.data(), 8, 4, 3, cudaMemcpyHostToDevice));
  std::vector<char> back(64);
  ASSERT_EQ(cudaSuccess, cudaMemcpy2DAsync(back.data(), 16, device_, 16, 16, 4,
                                           cudaMemcpyDeviceToHost, stream_));

  EXPECT_EQ("hhhh............hhhh............hhhh............................",
            std::string(back.begin(), back.end()));
  EXPECT_EQ(cudaErrorInvalidPitchValue,
            cudaMemcpy2D(device_, 4, host_.data(), 8, 8, 3, cudaMemcpyHostToDevice));
}

TEST_F(ApiTest, PeersAreCopiedByTheirRightDevices) {
  void* other = nullptr;
  ASSERT_EQ(cudaSuccess, cudaSetDevice(3));
  ASSERT_EQ(cudaSuccess, cudaMalloc(&other, kBytes));
  ASSERT_EQ(cudaSuccess, cudaMemset(other, 'p', kBytes));
  ASSERT_EQ(cudaSuccess, cudaDeviceSynchronize());
  ASSERT_EQ(cudaSuccess, cudaSetDevice(0));

  EXPECT_EQ(cudaErrorInvalidValue, cudaMemset(other, 0, 1));
  EXPECT_EQ(cudaErrorInvalidValue,
            cudaMemcpyPeerAsync(device_, 0, other, 2, kBytes, stream_));
  EXPECT_EQ(cudaSuccess, cudaMemcpyPeerAsync(device_, 0, other, 3, kBytes, stream_));
  EXPECT_EQ(cudaSuccess, cudaStreamSynchronize(stream_));
  EXPECT_EQ('p', static_cast<char*>(device_)[5]);
  EXPECT_EQ(cudaSuccess, cudaFree(other));
}

TEST_F(ApiTest, PeerAccessIsEnabledOnce) {
  ASSERT_EQ(cudaSuccess, cudaDeviceEnablePeerAccess(5, 0));

  EXPECT_EQ(cudaErrorPeerAccessAlreadyEnabled, cudaDeviceEnablePeerAccess(5, 0));
  EXPECT_EQ(cudaSuccess, cudaDeviceDisablePeerAccess(5));
  EXPECT_EQ(cudaErrorPeerAccessNotEnabled, cudaDeviceDisablePeerAccess(5));
}

TEST_F(ApiTest, PointersTellWhereTheyPoint) {
  cudaPointerAttributes of_device{};
  cudaPointerAttributes of_pinned{};
  cudaPointerAttributes of_host{};
  ASSERT_EQ(cudaSuccess, cudaPointerGetAttributes(&of_device, device_));
  ASSERT_EQ(cudaSuccess, cudaPointerGetAttributes(&of_pinned, pinned_));
  ASSERT_EQ(cudaSuccess, cudaPointerGetAttributes(&of_host, host_.data()));

  EXPECT_EQ(cudaMemoryTypeDevice, of_device.type);
  EXPECT_EQ(nullptr, of_device.hostPointer);
  EXPECT_EQ(cudaMemoryTypeHost, of_pinned.type);
  EXPECT_EQ(pinned_, of_pinned.devicePointer);
  EXPECT_EQ(cudaMemoryTypeUnregistered, of_host.type);
}

TEST_F(ApiTest, HostMemoryIsRegisteredOnce) {
  ASSERT_EQ(cudaSuccess, cudaHostRegister(host_.data(), kBytes, 0));

  EXPECT_EQ(cudaErrorHostMemoryAlreadyRegistered,
            cudaHostRegister(host_.data() + 8, 8, 0));
  EXPECT_EQ(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(host_.data() + 8));
  EXPECT_EQ(cudaSuccess, cudaHostUnregister(host_.data()));
  EXPECT_EQ(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(host_.data()));
}

TEST_F(ApiTest, AnErrorIsRememberedByItsThreadUntilItIsTaken) {
  EXPECT_EQ(cudaErrorInvalidValue, cudaFree(host_.data()));
  cudaError_t elsewhere = cudaErrorUnknown;
  std::thread([&] { elsewhere = cudaGetLastError(); }).join();

  EXPECT_EQ(cudaSuccess, elsewhere);
  EXPECT_EQ(cudaErrorInvalidValue, cudaPeekAtLastError());
  EXPECT_EQ(cudaErrorInvalidValue, cudaGetLastError());
  EXPECT_EQ(cudaSuccess, cudaGetLastError());
  EXPECT_STREQ("cudaErrorInvalidValue", cudaGetErrorName(cudaErrorInvalidValue));
}

TEST_F(ApiTest, AFaultStaysWithItsDevice) {
  void* never = nullptr;
  poison(4, cudaErrorIllegalAddress, "a test broke it");
  ASSERT_EQ(cudaSuccess, cudaSetDevice(4));

  EXPECT_EQ(cudaErrorIllegalAddress, cudaMalloc(&never, 8));
  EXPECT_EQ(cudaErrorIllegalAddress, cudaGetLastError());
  EXPECT_EQ(cudaErrorIllegalAddress, cudaGetLastError());
  EXPECT_EQ(cudaErrorIllegalAddress, cudaDeviceSynchronize());
  ASSERT_EQ(cudaSuccess, cudaSetDevice(0));
  EXPECT_EQ(cudaSuccess, cudaDeviceSynchronize());
  ASSERT_EQ(cudaSuccess, cudaSetDevice(4));
  EXPECT_EQ(cudaSuccess, cudaDeviceReset());
  EXPECT_EQ(cudaSuccess, cudaMalloc(&never, 8));
  EXPECT_EQ(cudaSuccess, cudaFree(never));
  ASSERT_EQ(cudaSuccess, cudaSetDevice(0));
}

TEST_F(ApiTest, AHostFunctionMustNotCallCuda) {
  cudaError_t found = cudaSuccess;
  const auto call = [](void* result) {
    *static_cast<cudaError_t*>(result) = cudaDeviceSynchronize();
  };
  ASSERT_EQ(cudaSuccess, cudaLaunchHostFunc(stream_, call, &found));
  ASSERT_EQ(cudaSuccess, cudaStreamSynchronize(stream_));

  EXPECT_EQ(cudaErrorNotPermitted, found);
}

TEST_F(ApiTest, AnEventBelongsToItsDevice) {
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaSuccess, cudaSetDevice(1));
  ASSERT_EQ(cudaSuccess, cudaEventCreateWithFlags(&event, 0));

  EXPECT_EQ(cudaErrorInvalidResourceHandle, cudaEventRecord(event, stream_));
  EXPECT_EQ(cudaSuccess, cudaEventRecord(event, nullptr));
  EXPECT_EQ(cudaSuccess, cudaEventSynchronize(event));
  EXPECT_EQ(cudaSuccess, cudaEventDestroy(event));
  EXPECT_EQ(cudaErrorInvalidResourceHandle, cudaEventQuery(event));
  ASSERT_EQ(cudaSuccess, cudaSetDevice(0));
}

TEST_F(ApiTest, FreeingWaitsForTheStreamsOfTheDevice) {
  void* other = nullptr;
  ASSERT_EQ(cudaSuccess, cudaMalloc(&other, kBytes));
  block();
  ASSERT_EQ(cudaSuccess, cudaMemsetAsync(other, 1, kBytes, stream_));
  std::thread opens([this] {
    ::usleep(20'000);
    gate_ = true;
  });

  EXPECT_EQ(cudaSuccess, cudaFree(other));
  EXPECT_TRUE(gate_);
  opens.join();
}

TEST_F(ApiTest, MemoryFreedInAStreamIsFreedWhenTheStreamComesToIt) {
  void* other = nullptr;
  ASSERT_EQ(cudaSuccess, cudaMallocAsync(&other, kBytes, stream_));
  block();
  ASSERT_EQ(cudaSuccess, cudaFreeAsync(other, stream_));
  EXPECT_EQ(2 * kBytes, memory_use(0).used);
  gate_ = true;
  ASSERT_EQ(cudaSuccess, cudaStreamSynchronize(stream_));

  EXPECT_EQ(kBytes, memory_use(0).used);
}

TEST_F(ApiTest, AProcessOpensTheMemoryOfAnother) {
  cudaIpcMemHandle_t handle{};
  void* same = nullptr;
  ASSERT_EQ(cudaSuccess, cudaMemset(device_, 'i', kBytes));
  ASSERT_EQ(cudaSuccess, cudaDeviceSynchronize());
  ASSERT_EQ(cudaSuccess, cudaIpcGetMemHandle(&handle, device_));
  EXPECT_EQ(cudaErrorDeviceUninitialized, cudaIpcOpenMemHandle(&same, handle, 1));
  EXPECT_EQ(cudaErrorInvalidValue, cudaIpcGetMemHandle(&handle, pinned_));

  handle.reserved[0] ^= 1;
  EXPECT_EQ(cudaErrorInvalidValue, cudaIpcOpenMemHandle(&same, handle, 1));
}

TEST_F(ApiTest, AForkedProcessIsToldToStartOtherwise) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(cudaDeviceSynchronize() == cudaErrorInitializationError);
  int status = 0;
  ASSERT_EQ(child, ::waitpid(child, &status, 0));

  EXPECT_EQ(1, WEXITSTATUS(status));
}

TEST_F(ApiTest, NothingIsEverCaptured) {
  auto status = static_cast<cudaStreamCaptureStatus>(7);
  unsigned long long id = 1;
  ASSERT_EQ(cudaSuccess, cudaStreamIsCapturing(stream_, &status));
  EXPECT_EQ(cudaStreamCaptureStatusNone, status);
  EXPECT_EQ(cudaSuccess, cudaStreamGetCaptureInfo(stream_, &status, &id, nullptr,
                                                  nullptr, nullptr, nullptr));
  EXPECT_EQ(cudaStreamCaptureStatusNone, status);
}

TEST_F(ApiTest, NullHandlesAndResultsAreErrorsNotCrashes) {
  EXPECT_EQ(cudaErrorInvalidValue, cudaMalloc(nullptr, 8));
  EXPECT_EQ(cudaErrorInvalidValue, cudaGetDeviceCount(nullptr));
  EXPECT_EQ(cudaErrorInvalidValue, cudaStreamCreate(nullptr));
  EXPECT_EQ(cudaErrorInvalidResourceHandle, cudaEventRecord(nullptr, stream_));
  EXPECT_EQ(cudaErrorInvalidResourceHandle, cudaStreamDestroy(nullptr));
  EXPECT_EQ(cudaSuccess, cudaFree(nullptr));
  EXPECT_EQ(cudaSuccess, cudaFreeHost(nullptr));
}

}  // namespace
}  // namespace weightsync::emulator
