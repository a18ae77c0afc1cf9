#include "configuration.h"

#include <gtest/gtest.h>

namespace weightsync::emulator {
namespace {

using Devices = std::vector<int>;

TEST(ConfigurationTest, SaysNothingAndGetsEightDevices) {
  const Configuration configuration = read_configuration(nullptr, nullptr, nullptr);

  EXPECT_EQ((Devices{0, 1, 2, 3, 4, 5, 6, 7}), configuration.devices);
  EXPECT_EQ(kDefaultMemory, configuration.memory);
}

TEST(ConfigurationTest, TakesTheNumbersOfTheEnvironment) {
  const Configuration configuration = read_configuration("2", "4096", nullptr);

  EXPECT_EQ((Devices{0, 1}), configuration.devices);
  EXPECT_EQ(4096U, configuration.memory);
}

TEST(ConfigurationTest, TakesTheDefaultForWhatIsNoNumber) {
  testing::internal::CaptureStderr();
  const Configuration configuration = read_configuration("two", "-1", nullptr);
  const std::string said = testing::internal::GetCapturedStderr();

  EXPECT_EQ(8U, configuration.devices.size());
  EXPECT_EQ(kDefaultMemory, configuration.memory);
  EXPECT_NE(std::string::npos, said.find("WEIGHTSYNC_EMULATOR_GPUS")) << said;
  EXPECT_NE(std::string::npos, said.find("found 'two'")) << said;
}

TEST(ConfigurationTest, HidesAndReordersDevicesAsCudaDoes) {
  EXPECT_EQ((Devices{3, 0}), read_configuration("4", nullptr, "3,0").devices);
  EXPECT_EQ((Devices{}), read_configuration("4", nullptr, "").devices);
  EXPECT_EQ((Devices{1}), read_configuration("4", nullptr, "1,9,2").devices);
}

}  // namespace
}  // namespace weightsync::emulator
