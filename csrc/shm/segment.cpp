#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace weightsync::shm {
namespace {

constexpr const char* kReplaced = " is gone: its descriptor is something else now";

// The kernel reserves this much in about 10 ms and 20 us.
constexpr std::size_t kReserveAtOnce = std::size_t{16} << 20;
constexpr std::size_t kReserveAtLeast = std::size_t{32} << 10;

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

// The smallest number a cgroup file or /proc/meminfo gives; "max" and no file give
// none.
std::optional<std::uint64_t> read_number(const char* path) {
  std::ifstream file(path);
  std::uint64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

// Bytes behind a key of a file of keys and numbers; `scale` bytes are one.
std::uint64_t read_key(const char* path, const std::string& wanted,
                       std::uint64_t scale) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string key;
    std::uint64_t number = 0;
    if (words >> key >> number && key == wanted) return number * scale;
  }
  return 0;
}

std::optional<std::uint64_t> memory_available() {
  const std::uint64_t nbytes = read_key("/proc/meminfo", "MemAvailable:", 1024);
  return nbytes == 0 ? std::nullopt : std::make_optional(nbytes);
}

std::optional<std::uint64_t> cgroup_available() {
  const auto limit = read_number("/sys/fs/cgroup/memory.max");
  const auto used = read_number("/sys/fs/cgroup/memory.current");
  if (!limit || !used) return std::nullopt;
  // Cached files count as used, but give way: a read checkpoint must not refuse a
  // window.
  const char* const stat = "/sys/fs/cgroup/memory.stat";
  const std::uint64_t cached =
      read_key(stat, "inactive_file", 1) + read_key(stat, "active_file", 1);
  const std::uint64_t kept = *used > cached ? *used - cached : 0;
  return *limit > kept ? *limit - kept : 0;
}

// Asking for pages beyond a limit would invite the out-of-memory killer, so refuse
// first.
Status check_room(std::size_t nbytes) {
  for (const auto& room : {memory_available(), cgroup_available()}) {
    if (room && nbytes > *room) {
      return {Code::kSystem, "cannot allocate " + describe(nbytes) + ": only " +
                                 std::to_string(*room) + " bytes are available"};
    }
  }
  return {};
}

// Growing a file beyond these would be SIGXFSZ, or a negative size.
Status check_size(std::size_t nbytes) {
  if (nbytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max())) {
    return {Code::kSystem,
            "cannot allocate " + describe(nbytes) + ": no file is so big"};
  }
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && nbytes > limit.rlim_cur) {
    return {Code::kSystem, "cannot allocate " + describe(nbytes) +
                               ": the file size limit (ulimit -f) is " +
                               std::to_string(limit.rlim_cur) + " bytes"};
  }
  return {};
}

// In pieces: a signal makes the kernel give up and undo a call, so a timer that ticks
// faster than the call takes would let it never end.
Status reserve_pages(int fd, std::size_t nbytes) {
  std::size_t piece = kReserveAtOnce;
  for (std::size_t at = 0; at < nbytes;) {
    const std::size_t length = std::min(piece, nbytes - at);
    if (::fallocate(fd, 0, static_cast<off_t>(at), static_cast<off_t>(length)) == 0) {
      at += length;
    } else if (errno == EINTR) {
      piece = std::max(piece / 2, kReserveAtLeast);
    } else {
      return system_error("reserve " + describe(nbytes), errno);
    }
  }
  return {};
}

Status reserve(int fd, std::size_t nbytes, Populate populate) {
  if (::ftruncate(fd, static_cast<off_t>(nbytes)) != 0) {
    return system_error("size " + describe(nbytes), errno);
  }
  if (populate == Populate::kYes) {
    if (Status reserved = reserve_pages(fd, nbytes); !reserved.ok()) return reserved;
  }
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (::fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    return system_error("seal " + describe(nbytes), errno);
  }
  return {};
}

// Whether this is the memory meant, and of a size that nobody can change any more.
bool is_found(int fd, const struct stat& info, const Locator& wanted) {
  if (info.st_ino != wanted.inode) return false;
  if (static_cast<std::uint64_t>(info.st_size) != wanted.nbytes) return false;
  const int seals = ::fcntl(fd, F_GET_SEALS);  // fails for what is no memfd
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
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

Result<std::shared_ptr<Segment>> Segment::create(std::size_t nbytes,
                                                 Populate populate) {
  if (nbytes == 0) return Status(Code::kInvalid, "a segment needs at least one byte");
  if (Status size = check_size(nbytes); !size.ok()) return size;
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
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) return system_error("inspect a segment", errno);
  Result<std::byte*> data = map(fd.get(), nbytes, populate);
  if (!data.ok()) return data.status();
  return std::shared_ptr<Segment>(
      new Segment(data.value(), nbytes, fd.release(), info.st_ino));
}

void Segment::populate(std::size_t offset, std::size_t nbytes) const {
  if (nbytes == 0 || offset >= nbytes_) return;
  static const auto kPage = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t first = offset / kPage * kPage;
  const std::size_t last = std::min(nbytes_, offset + std::min(nbytes, nbytes_));
  (void)::madvise(data_ + first, last - first, MADV_POPULATE_WRITE);
}

Result<std::shared_ptr<Segment>> Segment::open(const Locator& locator,
                                               Populate populate) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%lld/fd/%lld",
                static_cast<long long>(locator.pid),
                static_cast<long long>(locator.fd));
  const std::string what = "shared memory of process " + std::to_string(locator.pid);
  // Opened without blocking: a recycled number may be a pipe. Its inode tells it apart.
  const Descriptor fd(::open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (fd.get() < 0 && (errno == ENOENT || errno == ESRCH)) {
    return Status(Code::kPeer, what + " is gone, or lives in another PID namespace");
  }
  // No memfd answers so; a socket, an eventfd or a directory does.
  const bool other_kind = errno == ENXIO || errno == EISDIR;
  if (fd.get() < 0 && other_kind) return Status(Code::kPeer, what + kReplaced);
  if (fd.get() < 0) return system_error("open " + what, errno);
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) return system_error("inspect " + what, errno);
  if (!is_found(fd.get(), info, locator)) return Status(Code::kPeer, what + kReplaced);
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
