#include "emulator/nccl/transfer.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>

#include "emulator/core.h"
#include "emulator/nccl/comm.h"
#include "emulator/nccl/process_faults.h"
#include "emulator/nccl/stall.h"

namespace weightsync::emulator::nccl {

namespace {

constexpr int kIllegalAddress = 700;  // cudaErrorIllegalAddress

Outcome lose_device(const Communicator& communicator, const std::string& found) {
  const std::string message =
      communicator.describe() + " cannot access a buffer: " + found;
  poison(communicator.device(), kIllegalAddress, message);
  return {ncclUnhandledCudaError, message};
}

}  // namespace

Outcome check_call(const Communicator& communicator, const char* role, int rank,
                   ncclDataType_t datatype) {
  if (Outcome usable = communicator.usable(); !usable.ok()) return usable;
  if (rank < 0 || rank >= communicator.size()) {
    return invalid_argument(std::string("invalid ") + role + " " +
                            std::to_string(rank) + ": " + communicator.describe());
  }
  if (!is_data_type(datatype)) {
    return invalid_argument("invalid data type " +
                            std::to_string(static_cast<int>(datatype)));
  }
  return {};
}

Outcome ask_faults(OperationKind kind, Communicator& communicator, Action& fault) {
  Faults& faults = process_faults();
  fault = faults.next(kind, faults.rank_of(communicator.rank()));
  if (fault.kind == Action::Kind::kBlock && !carry_out_watched(communicator, fault)) {
    return {ncclInternalError, "the call was aborted"};
  }
  const int code = failed(fault);
  if (code == 0) return {};
  return {static_cast<ncclResult_t>(code), "failed by the fault " + fault.entry};
}

Outcome check_access(const Communicator& communicator, const void* address,
                     std::size_t nbytes) {
  if (const shm::Status range = check_range(address, nbytes); !range.ok()) {
    return lose_device(communicator, range.message());
  }
  const std::optional<Allocation> found = find_allocation(address);
  if (found && found->kind == Kind::kMalloc && found->device != communicator.device()) {
    return lose_device(communicator,
                       "it is memory of device " + std::to_string(found->device));
  }
  return {};
}

Outcome SharedBuffer::create(const void* address, std::size_t nbytes, bool filled,
                             SharedBuffer& created) {
  created.address_ = static_cast<std::byte*>(const_cast<void*>(address));
  created.nbytes_ = nbytes;
  created.remote_ = locate(address);
  if (created.remote_.memory.fd >= 0 && created.remote_.nbytes >= nbytes) return {};
  auto stand_in = shm::Segment::create(nbytes, shm::Populate::kNo);
  if (!stand_in.ok()) {
    return {ncclSystemError, "no memory to stand in for a buffer of " +
                                 std::to_string(nbytes) +
                                 " bytes: " + stand_in.status().message()};
  }
  created.stand_in_ = stand_in.take();
  std::byte* const data = created.stand_in_->data();
  created.remote_ = {created.stand_in_->locator(), 0,
                     reinterpret_cast<std::uintptr_t>(data), nbytes};
  if (filled) std::memcpy(data, address, nbytes);
  return {};
}

std::byte* SharedBuffer::data() const {
  return stand_in_ ? stand_in_->data() : address_;
}

void SharedBuffer::flush() const {
  if (stand_in_) std::memcpy(address_, stand_in_->data(), nbytes_);
}

CallSiteText text_of(const std::string& call_site) {
  CallSiteText result{};
  std::snprintf(result.text, sizeof result.text, "%s", call_site.c_str());
  return result;
}

std::string to_string(const CallSiteText& site) {
  return {site.text, strnlen(site.text, sizeof site.text)};
}

std::string describe_elements(std::size_t count, DataType type) {
  return std::to_string(count) + " " + name_of(type);
}

}  // namespace weightsync::emulator::nccl
