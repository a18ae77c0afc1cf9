// NcclGroup: what is called between ncclGroupStart and ncclGroupEnd.
#pragma once

#include "backend/nccl/raising.h"
#include "nccl/library.h"

namespace weightsync {

// Ends the group in any case: one that is left open by an exception would swallow
// whatever this thread calls later.
class NcclGroup {
 public:
  explicit NcclGroup(const nccl::Library& library) : library_(library) {
    raise(library_.check(library_.ncclGroupStart(), "ncclGroupStart"));
  }
  ~NcclGroup() {
    if (open_) (void)library_.ncclGroupEnd();
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // Everything is enqueued when it returns.
  void end() {
    open_ = false;
    raise(library_.check(library_.ncclGroupEnd(), "ncclGroupEnd"));
  }

 private:
  const nccl::Library& library_;
  bool open_ = true;
};

}  // namespace weightsync
