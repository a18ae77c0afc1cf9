#include "cuda/runtime.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>

#include "emulator/core.h"

namespace weightsync::cuda {
namespace {

using shm::Code;
using shm::Status;

bool says(const Status& status, const std::string& words) {
  return status.message().find(words) != std::string::npos;
}

TEST(RuntimeTest, TheFunctionsAreThoseOfThisProcess) {
  EXPECT_TRUE(runtime().set_device.exists());
  EXPECT_TRUE(runtime().memcpy_async.exists());
  EXPECT_TRUE(runtime().memset_async.exists());
  EXPECT_TRUE(runtime().launch_host_func.exists());
  EXPECT_TRUE(runtime().host_register.exists());
  EXPECT_TRUE(runtime().host_unregister.exists());
  EXPECT_TRUE(runtime().get_last_error.exists());
  EXPECT_TRUE(runtime().error_string.exists());
}

TEST(RuntimeTest, ADeviceIsBoundOrTheErrorNamesTheCall) {
  const Status bound = bind_device(0);
  const Status refused = bind_device(1000);

  EXPECT_TRUE(bound.ok()) << bound.message();
  EXPECT_EQ(Code::kSystem, refused.code());
  EXPECT_TRUE(says(refused, "cudaSetDevice failed: ")) << refused.message();
}

TEST(RuntimeTest, BytesAreCopiedSetAndFollowedByAHostFunction) {
  ASSERT_TRUE(bind_device(0).ok());
  auto allocated = emulator::allocate(0, emulator::Kind::kMalloc, 8);
  ASSERT_TRUE(allocated.ok());
  std::byte* const device = allocated.value().base;
  std::array<char, 8> back{};
  bool called = false;
  const auto note = [](void* data) { *static_cast<bool*>(data) = true; };
  const Runtime& cuda = runtime();

  EXPECT_EQ(cudaSuccess, cuda.memset_async(device, 7, 8, nullptr));
  EXPECT_EQ(cudaSuccess,
            cuda.memcpy_async(back.data(), device, 8, cudaMemcpyDeviceToHost, nullptr));
  EXPECT_EQ(cudaSuccess, cuda.launch_host_func(nullptr, note, &called));
  emulator::stream_of(nullptr)->synchronize();
  EXPECT_EQ(std::string(8, 7), std::string(back.data(), back.size()));
  EXPECT_TRUE(called);
  EXPECT_TRUE(emulator::release(device).ok());
}

TEST(RuntimeTest, WithoutARuntimeACallIsUnsupported) {
  const Runtime none;
  const Status status = none.check(none.set_device(0), "cudaSetDevice");

  EXPECT_EQ(Code::kUnsupported, status.code());
  EXPECT_TRUE(says(status, "no CUDA runtime")) << status.message();
}

}  // namespace
}  // namespace weightsync::cuda
