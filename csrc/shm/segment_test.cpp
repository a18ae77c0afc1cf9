#include "segment.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "test_support.h"

namespace weightsync::shm {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::shared_ptr<Segment> created(std::size_t nbytes,
                                 Populate populate = Populate::kNo) {
  Result<std::shared_ptr<Segment>> segment = Segment::create(nbytes, populate);
  EXPECT_TRUE(segment.ok()) << segment.status().message();
  return segment.take();
}

Code code_of_opening(const Locator& locator) {
  return Segment::open(locator, Populate::kNo).status().code();
}

int fd_of(const Segment& segment) { return static_cast<int>(segment.locator().fd); }

TEST(Segment, IsZeroAndPrivateToTheUser) {
  const auto segment = created(10'000);
  struct stat info{};
  ASSERT_EQ(0, ::fstat(fd_of(*segment), &info));

  EXPECT_EQ(0600U, info.st_mode & 0777U);
  EXPECT_EQ(10'000, info.st_size);
  for (std::size_t i = 0; i < segment->nbytes(); ++i) {
    ASSERT_EQ(std::byte{0}, segment->data()[i]);
  }
}

TEST(Segment, CannotChangeItsSize) {
  const auto segment = created(kMiB);

  EXPECT_EQ(-1, ::ftruncate(fd_of(*segment), 0));
  EXPECT_EQ(EPERM, errno);
  EXPECT_EQ(-1, ::ftruncate(fd_of(*segment), 2 * kMiB));
  EXPECT_EQ(-1, ::fcntl(fd_of(*segment), F_ADD_SEALS, F_SEAL_WRITE));
}

std::size_t resident_pages(const Segment& segment) {
  std::vector<unsigned char> pages(segment.nbytes() / 4096 + 1);
  EXPECT_EQ(0, ::mincore(segment.data(), segment.nbytes(), pages.data()));
  return static_cast<std::size_t>(
      std::count_if(pages.begin(), pages.end(), [](auto page) { return page & 1; }));
}

TEST(Segment, PopulatesThePagesThatHoldBytes) {
  const auto segment = created(kMiB + 100);
  segment->populate(4095, 2);
  EXPECT_EQ(2U, resident_pages(*segment));
  segment->populate(10 * 4096, 4096);
  EXPECT_EQ(3U, resident_pages(*segment));
  segment->populate(kMiB, kMiB);  // what is beyond the end is left out
  EXPECT_EQ(4U, resident_pages(*segment));
  segment->populate(0, 0);
  segment->populate(2 * kMiB, 1);

  EXPECT_EQ(4U, resident_pages(*segment));
}

TEST(Segment, IsNotInheritedByOtherPrograms) {
  const auto segment = created(1);

  EXPECT_EQ(FD_CLOEXEC, ::fcntl(fd_of(*segment), F_GETFD) & FD_CLOEXEC);
}

TEST(Segment, HasEveryPageBeforeItIsUsed) {
  const auto segment = created(kMiB + 1, Populate::kYes);
  std::vector<unsigned char> present(257);
  ASSERT_EQ(0, ::mincore(segment->data(), segment->nbytes(), present.data()));

  for (const unsigned char page : present) EXPECT_EQ(1, page & 1);
}

TEST(Segment, IsReservedDespiteATimerThatTicks) {
  static std::atomic<int> ticks{0};
  struct sigaction act{};
  struct sigaction before{};
  act.sa_handler = [](int) { ++ticks; };
  ::sigaction(SIGALRM, &act, &before);
  const itimerval often{{0, 1000}, {0, 1000}};
  ::setitimer(ITIMER_REAL, &often, nullptr);

  created(64 * kMiB, Populate::kYes);

  const itimerval never{};
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  EXPECT_GT(ticks, 0);
}

TEST(Segment, OpenedAgainIsTheSameMemory) {
  const auto mine = created(kMiB);
  auto theirs = Segment::open(mine->locator(), Populate::kYes).take();
  std::memset(theirs->data(), 7, kMiB);

  EXPECT_NE(mine->data(), theirs->data());
  EXPECT_EQ(kMiB, theirs->nbytes());
  EXPECT_EQ(0, std::memcmp(mine->data(), theirs->data(), kMiB));
}

TEST(Segment, IsOpenedByAnotherProcess) {
  const auto segment = created(100);
  const Locator at = segment->locator();
  Child child([&](const Channel&) {
    auto opened = Segment::open(at, Populate::kNo);
    if (!opened.ok()) return 1;
    opened.value()->data()[99] = std::byte{42};
    return 0;
  });

  EXPECT_EQ(0, child.wait());
  EXPECT_EQ(std::byte{42}, segment->data()[99]);
}

TEST(Segment, LivesOnInWhoMappedIt) {
  auto mine = created(100);
  auto theirs = Segment::open(mine->locator(), Populate::kNo).take();
  mine->data()[0] = std::byte{1};
  mine.reset();

  EXPECT_EQ(std::byte{1}, theirs->data()[0]);
}

TEST(Segment, IsRefusedWhenItIsNotTheOneMeant) {
  const auto segment = created(100);
  Locator other_inode = segment->locator();
  ++other_inode.inode;
  Locator other_size = segment->locator();
  ++other_size.nbytes;
  Locator no_descriptor = segment->locator();
  no_descriptor.fd = 999'999;

  EXPECT_EQ(Code::kPeer, code_of_opening(other_inode));
  EXPECT_EQ(Code::kPeer, code_of_opening(other_size));
  EXPECT_EQ(Code::kPeer, code_of_opening(no_descriptor));
}

// What a descriptor's number may come to mean after its segment is closed.
class SegmentReplaced : public testing::TestWithParam<const char*> {
 protected:
  static int open_other(const std::string& kind) {
    if (kind == "segment") return ::dup(fd_of(*others_));
    if (kind == "unsealed") return ::memfd_create("other", MFD_CLOEXEC);
    if (kind == "eventfd") return ::eventfd(0, EFD_CLOEXEC);
    if (kind == "socket") return ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (kind == "folder") return ::open("/", O_RDONLY | O_CLOEXEC);
    if (kind == "file") return ::open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    int fds[2] = {-1, -1};
    EXPECT_EQ(0, ::pipe2(fds, O_CLOEXEC));
    ::close(fds[1]);
    return fds[0];
  }
  static inline std::shared_ptr<Segment> others_;
};

TEST_P(SegmentReplaced, IsRefusedAndNothingBlocks) {
  others_ = created(100);
  auto segment = created(100);
  const Locator at = segment->locator();
  segment.reset();
  const int other = open_other(GetParam());
  ASSERT_GE(other, 0);
  const int reused = static_cast<int>(at.fd);
  if (other != reused) {
    ASSERT_EQ(reused, ::dup2(other, reused));
    ::close(other);
  }

  EXPECT_EQ(Code::kPeer, code_of_opening(at));
  ::close(reused);
  others_.reset();
}

INSTANTIATE_TEST_SUITE_P(By, SegmentReplaced,
                         testing::Values("segment", "unsealed", "eventfd", "socket",
                                         "folder", "file", "pipe"),
                         [](const auto& each) { return std::string(each.param); });

TEST(Segment, OfADeadProcessIsRefused) {
  Child child([](const Channel& parent) {
    const auto segment = created(100);
    parent.say(std::to_string(segment->locator().fd) + " " +
               std::to_string(segment->locator().inode));
    parent.hear();
    return 0;
  });
  std::istringstream told(child.channel().hear());
  Locator at{child.pid(), -1, 0, 100};
  ASSERT_TRUE(told >> at.fd >> at.inode);
  ASSERT_EQ(Code::kOk, code_of_opening(at));
  child.kill();
  siginfo_t info{};
  ASSERT_EQ(0,
            ::waitid(P_PID, static_cast<id_t>(child.pid()), &info, WEXITED | WNOWAIT));

  EXPECT_EQ(Code::kPeer, code_of_opening(at)) << "dead, but not reaped";
  child.wait();
  EXPECT_EQ(Code::kPeer, code_of_opening(at)) << "reaped";
}

TEST(Segment, OfNoBytesIsAnError) {
  EXPECT_EQ(Code::kInvalid, Segment::create(0, Populate::kYes).status().code());
  EXPECT_EQ(Code::kInvalid, Segment::create(0, Populate::kNo).status().code());
}

TEST(Segment, OfAbsurdSizeIsAnErrorThatTellsTheSize) {
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
  for (const std::size_t nbytes : {kMost, kMost / 2 + 1, kMost / 2, kMost / 4}) {
    for (const Populate populate : {Populate::kYes, Populate::kNo}) {
      const Status status = Segment::create(nbytes, populate).status();

      EXPECT_EQ(Code::kSystem, status.code());
      EXPECT_NE(std::string::npos, status.message().find(std::to_string(nbytes)));
    }
  }
  const Status status = Segment::create(std::size_t{1} << 50, Populate::kYes).status();
  EXPECT_NE(std::string::npos, status.message().find("are available"));
}

TEST(Segment, BeyondTheFileSizeLimitIsAnErrorAndNoSignal) {
  Child child([](const Channel& parent) {
    const rlimit limit{64 << 10, 64 << 10};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    const Status lazy = Segment::create(kMiB, Populate::kNo).status();
    const Status whole = Segment::create(kMiB, Populate::kYes).status();
    const Status small = Segment::create(4096, Populate::kYes).status();
    const Status group = Group::create().status();
    parent.say(lazy.message());
    const bool refused = !lazy.ok() && !whole.ok() && !group.ok();
    return refused && small.ok() ? 0 : 2;
  });

  EXPECT_EQ(0, child.wait());
  EXPECT_NE(std::string::npos, child.channel().hear().find("ulimit -f"));
}

TEST(Segment, LeavesNothingBehind) {
  const auto names = names_in("/dev/shm");
  const std::size_t descriptors = open_descriptors();
  const std::size_t mapped = segments_mapped();
  for (int i = 0; i < 200; ++i) {
    const auto mine = created(10'000, Populate::kYes);
    const auto theirs = Segment::open(mine->locator(), Populate::kYes).take();
    Locator wrong = mine->locator();
    ++wrong.inode;
    ASSERT_EQ(Code::kPeer, code_of_opening(wrong));
    ASSERT_EQ(mapped + 2, segments_mapped());
    ASSERT_EQ(descriptors + 1, open_descriptors());
  }

  EXPECT_EQ(descriptors, open_descriptors());
  EXPECT_EQ(mapped, segments_mapped());
  for (const std::string& name : names_in("/dev/shm")) {
    EXPECT_TRUE(names.count(name) == 1 || name.find("weightsync") == std::string::npos);
  }
}

TEST(Segment, HoldsNothingAfterAnError) {
  const std::size_t descriptors = open_descriptors();
  for (int i = 0; i < 10; ++i) {
    (void)Segment::create(std::size_t{1} << 62, Populate::kNo);
  }

  EXPECT_EQ(descriptors, open_descriptors());
}

}  // namespace
}  // namespace weightsync::shm
