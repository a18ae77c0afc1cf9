// Segment: anonymous shared memory of one process, opened by its peers without a name.
//
// The memory is a memfd, sealed against resizing. A peer opens it as
// /proc/<pid>/fd/<fd> and proves by its inode that it found the right one, so nothing
// is ever left in a file system: when the last mapping goes, also by SIGKILL, the
// memory goes. Both sides must see the same /proc (one PID namespace) and run as the
// same user.
//
// A Segment owns its mapping, and its descriptor if it created the memory. It is
// immutable after creation; any thread may use it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "status.h"

namespace weightsync::shm {

// How a peer finds a segment. Plain numbers: it travels through shared memory.
struct Locator {
  std::int64_t pid = 0;
  std::int64_t fd = -1;
  std::uint64_t inode = 0;
  std::uint64_t nbytes = 0;
};

// Whether the pages are made present at once (windows) or at first touch (control).
enum class Populate : std::uint8_t { kNo, kYes };

class Segment {
 public:
  // Allocates nbytes of zeroes. Memory that is not there is an error here and now,
  // never a SIGBUS later: with kYes every page is reserved before this returns.
  static Result<std::shared_ptr<Segment>> create(std::size_t nbytes, Populate populate);

  // Maps the segment that another process (or this one) created.
  static Result<std::shared_ptr<Segment>> open(const Locator& locator,
                                               Populate populate);

  // Makes the pages present that hold these bytes, so that nobody waits for them later.
  // Only a hint: where the kernel will not, they come at first touch.
  void populate(std::size_t offset, std::size_t nbytes) const;

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  Locator locator() const;

 private:
  Segment(std::byte* data, std::size_t nbytes, int fd, std::uint64_t inode)
      : data_(data), nbytes_(nbytes), fd_(fd), inode_(inode) {}

  // Constant after construction.
  std::byte* const data_;
  const std::size_t nbytes_;
  const int fd_;  // -1 where a peer's memory is mapped
  const std::uint64_t inode_;
};

}  // namespace weightsync::shm
