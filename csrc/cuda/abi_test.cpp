// Sizes and offsets of the structures of CUDA 13, which callers were compiled with.
#include "cuda/abi.h"

#include <gtest/gtest.h>

#include <cstddef>

namespace {

TEST(CudaAbiTest, StructuresHaveTheSizesOfCuda) {
  EXPECT_EQ(1008U, sizeof(cudaDeviceProp));
  EXPECT_EQ(144U, sizeof(cudaFuncAttributes));
  EXPECT_EQ(88U, sizeof(cudaPointerAttributes));
  EXPECT_EQ(88U, sizeof(cudaMemPoolProps));
  EXPECT_EQ(12U, sizeof(cudaMemAccessDesc));
  EXPECT_EQ(56U, sizeof(cudaLaunchConfig_t));
  EXPECT_EQ(32U, sizeof(CUmemAllocationProp));
  EXPECT_EQ(12U, sizeof(CUmemAccessDesc));
  EXPECT_EQ(64U, sizeof(cudaIpcMemHandle_t));
}

TEST(CudaAbiTest, DevicePropertiesLieWhereCudaPutsThem) {
  EXPECT_EQ(256U, offsetof(cudaDeviceProp, uuid));
  EXPECT_EQ(360U, offsetof(cudaDeviceProp, major));
  EXPECT_EQ(552U, offsetof(cudaDeviceProp, surfaceAlignment));
  EXPECT_EQ(596U, offsetof(cudaDeviceProp, l2CacheSize));
  EXPECT_EQ(672U, offsetof(cudaDeviceProp, sharedMemPerBlockOptin));
  EXPECT_EQ(780U, offsetof(cudaDeviceProp, hostNumaMultinodeIpcSupported));
}

}  // namespace
