#include "ipc.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace weightsync::emulator {
namespace {

constexpr std::size_t kMemory = std::size_t{64} << 20;

IpcHandle handle_of(const Allocation& allocation) {
  IpcHandle handle;
  handle.magic = kIpcMemory;
  handle.locator = allocation.segment->locator();
  handle.nbytes = allocation.nbytes;
  return handle;
}

TEST(IpcTest, OpenedMemoryIsThatOfTheOtherProcess) {
  Memory ours(1, kMemory);
  const Allocation made = ours.allocate(0, Kind::kMalloc, 1000).take();
  made.base[5] = std::byte{3};
  const pid_t child = ::fork();
  if (child == 0) {
    Memory memory(1, kMemory);
    Ipc ipc;
    void* first = nullptr;
    void* again = nullptr;
    if (!ipc.open(memory, handle_of(made), 0, &first).ok()) ::_exit(1);
    if (!ipc.open(memory, handle_of(made), 0, &again).ok()) ::_exit(2);
    auto* const bytes = static_cast<std::byte*>(first);
    if (first != again || bytes[5] != std::byte{3}) ::_exit(3);
    bytes[5] = std::byte{4};
    if (memory.find(bytes + 999)->kind != Kind::kIpc) ::_exit(4);
    if (!ipc.close(memory, first).ok() || !ipc.close(memory, first).ok()) ::_exit(5);
    if (ipc.close(memory, first).ok() || memory.find(first)) ::_exit(6);
    ::_exit(42);
  }
  int status = 0;
  ASSERT_EQ(child, ::waitpid(child, &status, 0));

  EXPECT_EQ(42, WEXITSTATUS(status));
  EXPECT_EQ(std::byte{4}, made.base[5]);
}

TEST(IpcTest, MemoryThatIsGoneIsNotOpened) {
  Memory memory(1, kMemory);
  Ipc ipc;
  const Allocation made = memory.allocate(0, Kind::kMalloc, 1000).take();
  IpcHandle handle = handle_of(made);
  handle.locator.inode += 1;
  void* address = nullptr;

  EXPECT_EQ(cudaErrorInvalidResourceHandle,
            ipc.open(memory, handle, 0, &address).error());
}

}  // namespace
}  // namespace weightsync::emulator
