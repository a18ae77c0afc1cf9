#include "kernels.h"

#include <gtest/gtest.h>

namespace weightsync::emulator {
namespace {

void a_function() {}
void another() {}

const void* address(void (*function)()) {
  return reinterpret_cast<const void*>(function);
}

TEST(KernelsTest, ARefusalNamesTheKernelAndTheEmulatorOnce) {
  Kernels kernels;
  Kernels::Module* const module = kernels.add_module();
  kernels.add(module, address(&a_function), "_ZN3abc4fillIfEEvPT_");
  testing::internal::CaptureStderr();
  const Outcome first = kernels.refuse(address(&a_function));
  const Outcome second = kernels.refuse(address(&a_function));
  const std::string said = testing::internal::GetCapturedStderr();

  EXPECT_EQ(cudaErrorNotSupported, first.error());
  EXPECT_NE(std::string::npos, second.reason().find("void abc::fill<float>(float*)"));
  EXPECT_EQ(0U, said.find("weightsync emulator: a kernel was launched")) << said;
  EXPECT_EQ(said.find("abc::fill"), said.rfind("abc::fill")) << said;
}

TEST(KernelsTest, AnUnknownFunctionIsSaidToBeUnknown) {
  Kernels kernels;
  Kernels::Module* const module = kernels.add_module();
  kernels.add(module, address(&a_function), "fill");
  kernels.remove_module(module);

  EXPECT_EQ(0U, kernels.name_of(address(&a_function)).find("unknown"));
  EXPECT_EQ(0U, kernels.name_of(address(&another)).find("unknown"));
}

}  // namespace
}  // namespace weightsync::emulator
