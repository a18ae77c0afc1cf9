// The signatures in symbols.h against those of nccl.h, where CMake found one: a
// difference does not compile.
#include <gtest/gtest.h>

#if __has_include(<nccl.h>)
#define NCCL_OS_LINUX
#include <nccl.h>
#endif

#include "emulator/nccl/symbols.h"

namespace {

TEST(SymbolsTest, EachFunctionIsTheSameUnderBothOfItsNames) {
#if __has_include(<nccl.h>)
  EXPECT_EQ(reinterpret_cast<void*>(&ncclAllReduce),
            reinterpret_cast<void*>(&pncclAllReduce));
  EXPECT_EQ(reinterpret_cast<void*>(&ncclCommGrow),
            reinterpret_cast<void*>(&pncclCommGrow));
#else
  GTEST_SKIP() << "there is no nccl.h";
#endif
}

}  // namespace
