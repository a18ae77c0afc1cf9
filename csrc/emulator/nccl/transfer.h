// Transfer: what collectives and send/receive have in common.
//
// Buffers as peers see them, the checks that every call makes, and the texts by which
// ranks tell each other what they called from where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "emulator/faults.h"
#include "emulator/nccl/numbers.h"
#include "emulator/nccl/operation.h"
#include "emulator/nccl/outcome.h"
#include "nccl/abi.h"
#include "shm/segment.h"

namespace weightsync::emulator::nccl {

class Communicator;

// Usable communicator (5, 4), rank that is named in the call (4), data type (4).
Outcome check_call(const Communicator& communicator, const char* role, int rank,
                   ncclDataType_t datatype);

// Counts the call; a fault that fails it is the outcome, any other goes to `fault`, for
// the operation to carry out when it runs.
Outcome ask_faults(OperationKind kind, Communicator& communicator, Action& fault);

// Whether this rank's device can access the memory when the operation runs. If not,
// the device is lost, as after the fault of a kernel, and the outcome is 1.
Outcome check_access(const Communicator& communicator, const void* address,
                     std::size_t nbytes);

// Memory of this rank that its peers read while an operation runs.
class SharedBuffer {
 public:
  // Memory that peers cannot map as one piece has a stand-in that they can, which holds
  // its bytes if `filled`. Check the access first.
  static Outcome create(const void* address, std::size_t nbytes, bool filled,
                        SharedBuffer& created);

  const Remote& remote() const { return remote_; }
  // Where this rank writes what peers shall read; then flush().
  std::byte* data() const;
  void flush() const;

 private:
  std::byte* address_ = nullptr;
  std::size_t nbytes_ = 0;
  Remote remote_;
  std::shared_ptr<shm::Segment> stand_in_;
};

// Text in a descriptor, cut to fit.
struct CallSiteText {
  char text[104];
};

// "libtorch_cuda.so+0x12ab34": where an operation was called from.
CallSiteText text_of(const std::string& call_site);
std::string to_string(const CallSiteText& site);

// "4 float32".
std::string describe_elements(std::size_t count, DataType type);

}  // namespace weightsync::emulator::nccl
