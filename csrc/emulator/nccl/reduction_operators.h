// Reduction operators: what an ncclRedOp_t stands for in a communicator.
//
// The built-in ones are known to all; those of ncclRedOpCreatePreMulSum belong to one
// communicator and one data type. A call copies what it needs, so that an operator can
// be destroyed as soon as the calls that use it have returned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "emulator/nccl/numbers.h"
#include "emulator/nccl/outcome.h"
#include "emulator/nccl/reduce.h"
#include "nccl/abi.h"
#include "shm/annotations.h"

namespace weightsync::emulator::nccl {

class Communicator;

// How a call combines its inputs.
struct Operator {
  Reduction reduction = Reduction::kSum;
  // kPreMulSum: the factor, or where it is read when the collective executes.
  std::uint64_t factor = 0;
  const void* factor_address = nullptr;
};

// A part of a communicator. Any thread may call anything.
class ReductionOperators {
 public:
  struct Created {
    ncclDataType_t datatype;
    Operator meaning;
  };

  // `owner` is whose part this is: handles of different communicators differ.
  ncclRedOp_t create(const Created& created, const void* owner);
  // False for what create() did not return, or was destroyed already.
  bool destroy(ncclRedOp_t op);
  std::optional<Created> find(ncclRedOp_t op) const;

 private:
  mutable shm::Mutex mu_;
  std::map<int, Created> created_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::uint32_t next_ WEIGHTSYNC_GUARDED_BY(mu_) = 0;
};

// In the order in which a collective asks: whether the communicator knows the operator
// (4), and, unless there is nothing to reduce, what it means for this type (4).
Outcome check_operator(Communicator& communicator, ncclRedOp_t op);
Outcome find_operator(Communicator& communicator, ncclRedOp_t op,
                      ncclDataType_t datatype, Operator& found);

}  // namespace weightsync::emulator::nccl
