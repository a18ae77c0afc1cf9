#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace weightsync::shm {
namespace {

// A descriptor that is closed unless it is released to an owner.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

std::string describe(std::size_t nbytes) {
  return std::to_string(nbytes) + " bytes of shared memory";
}

// The smallest number a cgroup file or /proc/meminfo gives; "max" and no file give none.
std::optional<std::uint64_t> read_number(const char* path) {
  std::ifstream file(path);
  std::uint64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

std::optional<std::uint64_t> memory_available() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::uint64_t kibibytes = 0;
  std::string unit;
  while (file >> key >> kibibytes) {
    std::getline(file, unit);
    if (key == "MemAvailable:") return kibibytes * 1024;
  }
  return std::nullopt;
}

std::optional<std::uint64_t> cgroup_available() {
  const auto limit = read_number("/sys/fs/cgroup/memory.max");
  const auto used = read_number("/sys/fs/cgroup/memory.current");
  if (!limit || !used) return std::nullopt;
  return *limit > *used ? *limit - *used : 0;
}

// Asking for pages beyond a limit would invite the out-of-memory killer, so refuse first.
Status check_room(std::size_t nbytes) {
  for (const auto& room : {memory_available(), cgroup_available()}) {
    if (room && nbytes > *room) {
      return {Code::kSystem, "cannot allocate " + describe(nbytes) + ": only " +
                                 std::to_string(*room) + " bytes are available"};
    }
  }
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && nbytes > limit.rlim_cur) {
    return {Code::kSystem, "cannot allocate " + describe(nbytes) +
                               ": the file size limit (ulimit -f) is " +
                               std::to_string(limit.rlim_cur) + " bytes"};
  }
  return {};
}

Status reserve(int fd, std::size_t nbytes, Populate populate) {
  const auto size = static_cast<off_t>(nbytes);
  if (::ftruncate(fd, size) != 0) return system_error("size " + describe(nbytes), errno);
  if (populate == Populate::kYes) {
    int failed = 0;
    do {
      failed = ::fallocate(fd, 0, 0, size) == 0 ? 0 : errno;
    } while (failed == EINTR);
    if (failed != 0) return system_error("reserve " + describe(nbytes), failed);
  }
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (::fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    return system_error("seal " + describe(nbytes), errno);
  }
  return {};
}

Result<std::byte*> map(int fd, std::size_t nbytes, Populate populate) {
  void* const address =
      ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return system_error("map " + describe(nbytes), errno);
  if (populate == Populate::kYes &&
      ::madvise(address, nbytes, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    const int error = errno;
    ::munmap(address, nbytes);
    return system_error("populate " + describe(nbytes), error);
  }
  return static_cast<std::byte*>(address);
}

}  // namespace

Status system_error(const std::string& attempted, int error) {
  return {Code::kSystem, "cannot " + attempted + ": " + std::strerror(error)};
}

Result<std::shared_ptr<Segment>> Segment::create(std::size_t nbytes, Populate populate) {
  if (nbytes == 0) return Status(Code::kInvalid, "a segment needs at least one byte");
  if (populate == Populate::kYes) {
    if (Status room = check_room(nbytes); !room.ok()) return room;
  }
  Descriptor fd(::memfd_create("weightsync", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) return system_error("create " + describe(nbytes), errno);
  if (::fchmod(fd.get(), S_IRUSR | S_IWUSR) != 0) {
    return system_error("restrict " + describe(nbytes), errno);
  }
  if (Status reserved = reserve(fd.get(), nbytes, populate); !reserved.ok()) {
    return reserved;
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return system_error("inspect a segment", errno);
  Result<std::byte*> data = map(fd.get(), nbytes, populate);
  if (!data.ok()) return data.status();
  return std::shared_ptr<Segment>(
      new Segment(data.value(), nbytes, fd.release(), info.st_ino));
}

Result<std::shared_ptr<Segment>> Segment::open(const Locator& locator,
                                               Populate populate) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%lld/fd/%lld",
                static_cast<long long>(locator.pid), static_cast<long long>(locator.fd));
  const std::string what = "shared memory of process " + std::to_string(locator.pid);
  // Opened without blocking: a recycled number may be a pipe. Its inode tells it apart.
  const Descriptor fd(::open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0 && (errno == ENOENT || errno == ESRCH)) {
    return Status(Code::kPeer, what + " is gone, or lives in another PID namespace");
  }
  if (fd.get() < 0) return system_error("open " + what, errno);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return system_error("inspect " + what, errno);
  if (info.st_ino != locator.inode ||
      static_cast<std::uint64_t>(info.st_size) != locator.nbytes) {
    return Status(Code::kPeer, what + " is gone: its descriptor is something else now");
  }
  Result<std::byte*> data = map(fd.get(), locator.nbytes, populate);
  if (!data.ok()) return data.status();
  return std::shared_ptr<Segment>(
      new Segment(data.value(), locator.nbytes, -1, locator.inode));
}

Segment::~Segment() {
  ::munmap(data_, nbytes_);
  if (fd_ >= 0) ::close(fd_);
}

Locator Segment::locator() const { return {::getpid(), fd_, inode_, nbytes_}; }

}  // namespace weightsync::shm
