// PointToPoint: the sends and receives of one group, which make progress together.
//
// A sender announces its buffer in the receiver's inbox; the receiver copies and says
// so. Messages of a pair match in the order of their calls. A send ends when its data
// has been copied, so it needs its receive, as a large one does in NCCL: two ranks that
// first send to each other and then receive, outside of a group, wait for ever.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "emulator/faults.h"
#include "emulator/nccl/numbers.h"
#include "emulator/nccl/operation.h"
#include "emulator/nccl/transfer.h"

namespace weightsync::emulator::nccl {

// One ncclSend or ncclRecv.
struct Message {
  bool sends = false;
  int peer = 0;
  void* buffer = nullptr;
  std::size_t count = 0;
  DataType type = DataType::kInt8;
  std::string call_site;
  Action fault;

  std::size_t nbytes() const { return count * size_of(type); }
};

// "ncclSend of 4 float32 to rank 1".
std::string describe(const Message& message);

// What a sender tells the receiver.
struct MessageDescriptor {
  Remote buffer;
  std::uint64_t count = 0;
  DataType type = DataType::kInt8;
  CallSiteText call_site{};
};
static_assert(sizeof(MessageDescriptor) <= kDescriptorBytes);

class PointToPoint : public Operation {
 public:
  explicit PointToPoint(Message message) : messages_{std::move(message)} {}

  Phase phase() const override { return Phase::kPointToPoint; }
  std::string describe() const override;
  bool absorb(Operation& next) override;
  // 5 for a message to this rank itself without its counterpart in the group.
  Outcome prepare(Communicator& communicator) override;
  Outcome run(Execution& execution) override;

 private:
  class Run;

  std::vector<Message> messages_;  // in the order of the calls
};

}  // namespace weightsync::emulator::nccl
