// NVML's face of the emulated machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "emulator/core.h"
#include "emulator/device_traits.h"

extern "C" {
unsigned nvmlInit_v2();
unsigned nvmlDeviceGetCount_v2(unsigned* count);
unsigned nvmlDeviceGetHandleByIndex_v2(unsigned index, const void** device);
unsigned nvmlDeviceGetHandleByPciBusId_v2(const char* id, const void** device);
unsigned nvmlDeviceGetHandleByUUID(const char* uuid, const void** device);
unsigned nvmlDeviceGetUUID(const void* device, char* uuid, unsigned length);
unsigned nvmlDeviceGetGpuFabricInfoV(const void* device, void* info);
}

namespace weightsync::emulator {
namespace {

constexpr unsigned kSuccess = 0;
constexpr unsigned kNotFound = 6;

TEST(Management, finds_a_device_by_the_bus_that_cuda_names) {
  ASSERT_EQ(kSuccess, nvmlInit_v2());
  const void* by_index = nullptr;
  const void* by_bus = nullptr;
  const void* by_long_bus = nullptr;

  EXPECT_EQ(kSuccess, nvmlDeviceGetHandleByIndex_v2(1, &by_index));
  EXPECT_EQ(kSuccess, nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id(1).c_str(), &by_bus));
  EXPECT_EQ(kSuccess,
            nvmlDeviceGetHandleByPciBusId_v2("00000000:02:00.0", &by_long_bus));
  EXPECT_EQ(by_index, by_bus);
  EXPECT_EQ(by_index, by_long_bus);
}

TEST(Management, finds_a_device_by_its_uuid) {
  const void* by_index = nullptr;
  const void* by_uuid = nullptr;
  char uuid[64];
  ASSERT_EQ(kSuccess, nvmlDeviceGetHandleByIndex_v2(3, &by_index));
  ASSERT_EQ(kSuccess, nvmlDeviceGetUUID(by_index, uuid, sizeof uuid));

  EXPECT_EQ(kSuccess, nvmlDeviceGetHandleByUUID(uuid, &by_uuid));
  EXPECT_EQ(by_index, by_uuid);
  EXPECT_EQ("GPU-77656967-6874-7379-6e63-000000000003", std::string(uuid));
}

TEST(Management, knows_as_many_devices_as_the_machine_has) {
  unsigned count = 0;
  const void* device = nullptr;

  EXPECT_EQ(kSuccess, nvmlDeviceGetCount_v2(&count));
  EXPECT_EQ(static_cast<unsigned>(device_count()), count);
  EXPECT_EQ(kNotFound, nvmlDeviceGetHandleByIndex_v2(count, &device));
  EXPECT_EQ(kNotFound, nvmlDeviceGetHandleByPciBusId_v2("0000:00:00.0", &device));
  for (const char* nowhere :
       {"nowhere", "", "0000", "0000:", "0000::00.0", "0001:02:00.0"}) {
    EXPECT_EQ(kNotFound, nvmlDeviceGetHandleByPciBusId_v2(nowhere, &device)) << nowhere;
  }
}

TEST(Management, has_no_fabric) {
  const void* device = nullptr;
  unsigned char info[36];
  std::fill(std::begin(info), std::end(info), 0xff);
  ASSERT_EQ(kSuccess, nvmlDeviceGetHandleByIndex_v2(0, &device));

  EXPECT_EQ(kSuccess, nvmlDeviceGetGpuFabricInfoV(device, info));
  EXPECT_EQ(0xff, info[0]);   // the version stays
  EXPECT_EQ(0, info[28]);     // the state: not supported
  EXPECT_EQ(0xff, info[32]);  // what a longer version has behind it
}

}  // namespace
}  // namespace weightsync::emulator
