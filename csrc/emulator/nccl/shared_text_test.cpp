#include "emulator/nccl/shared_text.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

namespace weightsync::emulator::nccl {
namespace {

TEST(SharedText, what_is_set_is_read) {
  const auto text = std::make_unique<SharedText>();
  EXPECT_EQ("", text->get());
  text->set("waits for rank 1");
  EXPECT_EQ("waits for rank 1", text->get());
  text->set("");

  EXPECT_EQ("", text->get());
}

TEST(SharedText, a_long_text_is_cut) {
  const auto text = std::make_unique<SharedText>();
  text->set(std::string(SharedText::kBytes + 1, 'x'));

  EXPECT_EQ(std::string(SharedText::kBytes, 'x'), text->get());
}

TEST(SharedText, a_reader_never_sees_half_a_text) {
  const auto text = std::make_unique<SharedText>();
  const std::string one(400, 'a');
  const std::string other(300, 'b');
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int i = 0; i < 2000; ++i) text->set(i % 2 == 0 ? one : other);
    done = true;
  });
  bool whole = true;
  while (!done) {
    const std::string read = text->get();
    whole = whole && (read.empty() || read == one || read == other);
  }
  writer.join();

  EXPECT_TRUE(whole);
}

}  // namespace
}  // namespace weightsync::emulator::nccl
