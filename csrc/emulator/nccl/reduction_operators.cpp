#include "emulator/nccl/reduction_operators.h"

#include <cstring>
#include <string>

#include "emulator/nccl/comm.h"
#include "emulator/nccl/operations.h"

namespace weightsync::emulator::nccl {

namespace {

// Where the handles of a communicator start: anything, but not what another one has.
std::uint32_t first_handle(const void* owner) {
  std::uint64_t mixed = reinterpret_cast<std::uintptr_t>(owner) >> 4;
  mixed *= 0x9e3779b97f4a7c15U;
  return static_cast<std::uint32_t>(mixed >> 33);
}

bool is_built_in(ncclRedOp_t op) { return op >= 0 && op < ncclNumOps; }

std::string quoted(ncclRedOp_t op) { return std::to_string(static_cast<int>(op)); }

}  // namespace

ncclRedOp_t ReductionOperators::create(const Created& created, const void* owner) {
  const shm::MutexLock lock(mu_);
  const std::uint32_t first = first_handle(owner);
  for (;;) {
    const auto handle = static_cast<int>((first + next_++) & INT_MAX);
    const auto op = static_cast<ncclRedOp_t>(handle);
    if (is_built_in(op) || created_.count(handle) > 0) continue;
    created_.emplace(handle, created);
    return op;
  }
}

bool ReductionOperators::destroy(ncclRedOp_t op) {
  const shm::MutexLock lock(mu_);
  return created_.erase(static_cast<int>(op)) > 0;
}

std::optional<ReductionOperators::Created> ReductionOperators::find(
    ncclRedOp_t op) const {
  const shm::MutexLock lock(mu_);
  const auto found = created_.find(static_cast<int>(op));
  if (found == created_.end()) return std::nullopt;
  return found->second;
}

Outcome check_operator(Communicator& communicator, ncclRedOp_t op) {
  if (op < 0) return invalid_argument("invalid reduction operator " + quoted(op));
  if (is_built_in(op)) return {};
  if (communicator.part<ReductionOperators>().find(op)) return {};
  return invalid_argument("reduction operator " + quoted(op) + " is unknown to " +
                          communicator.describe());
}

Outcome find_operator(Communicator& communicator, ncclRedOp_t op,
                      ncclDataType_t datatype, Operator& found) {
  if (is_built_in(op)) {
    found = {static_cast<Reduction>(op), 0, nullptr};
    return {};
  }
  const auto created = communicator.part<ReductionOperators>().find(op);
  if (!created) return check_operator(communicator, op);
  if (created->datatype != datatype) {
    return invalid_argument("reduction operator " + quoted(op) +
                            " was created for data type " +
                            std::to_string(static_cast<int>(created->datatype)) +
                            ", not " + std::to_string(static_cast<int>(datatype)));
  }
  found = created->meaning;
  return {};
}

Outcome red_op_create_pre_mul_sum(ncclRedOp_t* op, void* scalar,
                                  ncclDataType_t datatype,
                                  ncclScalarResidence_t residence,
                                  const CommunicatorPtr& communicator) {
  if (const Outcome ready = communicator->ready(); !ready.ok()) return ready;
  if (op == nullptr) return invalid_argument("op is NULL");
  if (scalar == nullptr) return invalid_argument("scalar is NULL");
  Operator meaning{Reduction::kPreMulSum, 0, nullptr};
  if (residence == ncclScalarHostImmediate) {
    if (!is_data_type(datatype)) {
      return {ncclInternalError, "invalid data type " + std::to_string(datatype) +
                                     " of an immediate scalar"};
    }
    std::memcpy(&meaning.factor, scalar, size_of(static_cast<DataType>(datatype)));
  } else {
    meaning.factor_address = scalar;
  }
  *op = communicator->part<ReductionOperators>().create({datatype, meaning},
                                                        communicator.get());
  return {};
}

Outcome red_op_destroy(ncclRedOp_t op, const CommunicatorPtr& communicator) {
  if (is_built_in(op)) {
    return invalid_argument("reduction operator " + quoted(op) + " is built in");
  }
  if (communicator->part<ReductionOperators>().destroy(op)) return {};
  return invalid_argument("reduction operator " + quoted(op) + " is unknown to " +
                          communicator->describe());
}

}  // namespace weightsync::emulator::nccl
