// ncclCommWindowRegister, ncclCommWindowDeregister, ncclWinGetUserPtr: the rules of
// window_rules.h, carried out with all ranks.
#include "emulator/nccl/window.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "emulator/core.h"
#include "emulator/nccl/config.h"
#include "emulator/nccl/group.h"
#include "emulator/nccl/handles.h"
#include "emulator/nccl/operations.h"
#include "emulator/nccl/process_faults.h"
#include "emulator/nccl/rma.h"
#include "emulator/nccl/stall.h"
#include "emulator/nccl/switches.h"
#include "emulator/nccl/window_rules.h"

namespace weightsync::emulator::nccl {
namespace {

// What a rank tells the others about its part of a window.
struct Announcement {
  Remote memory;                 // from the start of its allocation
  std::uint64_t offset = 0;      // of the window in it
  std::uint64_t nbytes = 0;      // of the window
  std::uint64_t stride_use = 0;  // bytes of address space
  std::uint64_t device_bytes = 0;
  bool overlaps = false;  // with another window of the same rank
};

struct Request {
  CommunicatorPtr communicator;
  std::byte* buffer = nullptr;
  std::size_t nbytes = 0;
  ncclWindow_t* handle = nullptr;
  int flags = 0;
};

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::string describe(const Request& request) {
  char address[32];
  std::snprintf(address, sizeof address, "%p", static_cast<void*>(request.buffer));
  return "a window of " + std::to_string(request.nbytes) + " bytes at " + address +
         " on " + request.communicator->describe();
}

MemoryKind kind_of(const std::optional<Allocation>& found) {
  if (!found) return MemoryKind::kNone;
  return found->kind == Kind::kVmm ? MemoryKind::kVirtual : MemoryKind::kPlainDevice;
}

// Bytes from the start of the allocation to the end of the buffer, if they are mapped
// without a gap; else where the first mapping ends.
std::size_t mapped_bytes(const Allocation& found, std::size_t offset,
                         std::size_t nbytes) {
  const bool whole = check_range(found.base + offset, nbytes).ok();
  return std::max(found.nbytes, whole ? offset + nbytes : 0);
}

Outcome check_memory(const Request& request, const std::optional<Allocation>& found) {
  RegisterMemory memory;
  memory.kind = kind_of(found);
  memory.nbytes = request.nbytes;
  if (found) {
    memory.offset = static_cast<std::size_t>(request.buffer - found->base);
    memory.allocation_bytes = mapped_bytes(*found, memory.offset, memory.nbytes);
  }
  const Decision decision = decide_register_memory(memory);
  if (decision.code != ncclSuccess) {
    return {decision.code, describe(request) + ": " + decision.found};
  }
  const bool several = found && memory.offset + memory.nbytes > found->nbytes;
  if (several && !switches().elastic) {
    return invalid_argument(describe(request) +
                            ": it spans several allocations, and "
                            "NCCL_ELASTIC_BUFFER_REGISTER is 0");
  }
  return {};
}

Announcement announce(const Request& request, const Allocation& found,
                      Windows& windows) {
  Announcement mine;
  mine.memory = locate(found.base);
  mine.offset = static_cast<std::uint64_t>(request.buffer - found.base);
  mine.nbytes = request.nbytes;
  const std::size_t end = mine.offset + request.nbytes;
  mine.stride_use = round_up(std::max(found.nbytes, end), kVmmGranularity);
  mine.device_bytes = memory_use(request.communicator->device()).total;
  const shm::MutexLock lock(windows.mu);
  mine.overlaps = windows.table.overlapping(request.buffer, request.nbytes) != nullptr;
  return mine;
}

template <class Value>
Bytes to_bytes(const Value& value) {
  Bytes bytes(sizeof value);
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

Outcome gather(Communicator& communicator, const Announcement& mine,
               std::vector<Announcement>& all) {
  std::vector<Bytes> told;
  Outcome exchanged = communicator.exchange(
      "the registration of a window (ncclCommWindowRegister)", to_bytes(mine), told);
  if (!exchanged.ok()) return exchanged;
  for (const Bytes& bytes : told) {
    Announcement each;
    std::memcpy(&each, bytes.data(), std::min(bytes.size(), sizeof each));
    all.push_back(each);
  }
  return {};
}

constexpr int kAnySizesFrom = 23007;

// What happens on hardware is not defined; the same verdict on every rank.
Outcome check_sizes(const Request& request, const std::vector<Announcement>& all) {
  if (emulated_version() >= kAnySizesFrom) return {};
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank].nbytes == all[0].nbytes) continue;
    return invalid_argument(
        describe(request) + ": it has " + std::to_string(all[0].nbytes) +
        " bytes on rank 0 and " + std::to_string(all[rank].nbytes) + " on rank " +
        std::to_string(rank) + "; before 2.30.7 windows have one size on all ranks");
  }
  return {};
}

// What NCCL lets pass and does not survive; the same verdict on every rank.
Outcome check_strictly(const Request& request, const std::vector<Announcement>& all) {
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].offset != all[0].offset) {
      return invalid_argument(describe(request) + ": its offset in the allocation is " +
                              std::to_string(all[0].offset) + " on rank 0 and " +
                              std::to_string(all[rank].offset) + " on rank " +
                              std::to_string(rank) +
                              "; puts would land at the wrong place");
    }
    if (all[rank].overlaps) {
      return invalid_argument(describe(request) + ": on rank " + std::to_string(rank) +
                              " it overlaps a window that is registered already");
    }
  }
  return {};
}

// Takes its share of the address space, which is as large as the largest allocation.
Outcome reserve(const Request& request, const std::vector<Announcement>& all,
                Windows& windows, Window& window) {
  std::size_t device_bytes = 0;
  for (const Announcement& each : all) {
    window.stride_use = std::max<std::size_t>(window.stride_use, each.stride_use);
    device_bytes = std::max<std::size_t>(device_bytes, each.device_bytes);
  }
  const std::size_t stride = window_stride(device_bytes);
  const shm::MutexLock lock(windows.mu);
  const std::size_t used = windows.table.stride_used() + kVmmGranularity;  // signals
  if (used + window.stride_use <= stride) return {};
  return {ncclInternalError, describe(request) + ": no suitable space. " +
                                 std::to_string(windows.table.size()) +
                                 " windows take " + std::to_string(used) + " of " +
                                 std::to_string(stride) +
                                 " bytes; every window takes its whole allocation"};
}

// The segment of a rank: of this process, what its allocation holds, so that there is
// one mapping; else a mapping of this window's own. Either outlives the allocation.
std::shared_ptr<shm::Segment> segment_of(Communicator& communicator,
                                         const Remote& memory) {
  if (memory.memory.pid != ::getpid()) {
    return communicator.peer_memory().open(memory.memory);
  }
  // It came as a number. NOLINTNEXTLINE(performance-no-int-to-ptr)
  const auto found = find_allocation(reinterpret_cast<const void*>(memory.address));
  return found ? found->segment : nullptr;
}

// Maps the allocation of every rank, whole.
Outcome map_peers(const Request& request, const std::vector<Announcement>& all,
                  Window& window) {
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const Remote& memory = all[rank].memory;
    std::shared_ptr<shm::Segment> segment = segment_of(*request.communicator, memory);
    if (!segment) {
      return {ncclRemoteError, describe(request) + ": the memory of rank " +
                                   std::to_string(rank) + " cannot be mapped"};
    }
    std::byte* const base = segment->data() + memory.offset;
    window.peers.push_back({base, memory.nbytes, all[rank].nbytes, std::move(segment)});
  }
  return {};
}

// The part of a registration that all ranks make together.
Outcome register_together(const Request& request, const Allocation& found) {
  Communicator& communicator = *request.communicator;
  auto& windows = communicator.part<Windows>();
  const Announcement mine = announce(request, found, windows);
  std::vector<Announcement> all;
  if (Outcome told = gather(communicator, mine, all); !told.ok()) return told;
  if (Outcome sizes = check_sizes(request, all); !sizes.ok()) return sizes;
  if (switches().strict) {
    if (Outcome checked = check_strictly(request, all); !checked.ok()) return checked;
  }
  Window window;
  window.base = request.buffer;
  window.nbytes = request.nbytes;
  window.offset = mine.offset;
  window.flags = request.flags;
  window.putable = mine.offset + request.nbytes <= found.nbytes;
  if (Outcome room = reserve(request, all, windows, window); !room.ok()) return room;
  if (Outcome mapped = map_peers(request, all, window); !mapped.ok()) return mapped;
  std::vector<Bytes> nothing;
  Outcome barrier = communicator.exchange("the end of the registration of a window",
                                          Bytes(1), nothing);
  if (!barrier.ok()) return barrier;
  const auto handle = new_handle<ncclWindow_t>();
  {
    const shm::MutexLock lock(windows.mu);
    windows.table.add(handle, std::move(window));
  }
  *request.handle = handle;
  return {};
}

Outcome carry_out_registration(const Request& request, const Action& fault) {
  Communicator* const communicator = request.communicator.get();
  if (!carry_out_watched(*communicator, fault)) {
    return {ncclInternalError, "aborted while stalled by a fault: " + fault.entry};
  }
  if (communicator->revoked()) {
    return {ncclInternalError, describe(request) +
                                   ": the communicator was revoked, and a revoke stops "
                                   "what ranks exchange memory through"};
  }
  if (Outcome made = make_signals_with_windows(*communicator); !made.ok()) return made;
  const std::optional<Allocation> found = find_allocation(request.buffer);
  Outcome checked = check_memory(request, found);
  if (!checked.ok() || !found) return checked;
  return register_together(request, *found);
}

}  // namespace

std::shared_ptr<const Window> Windows::find(ncclWindow_t handle) {
  const shm::MutexLock lock(mu);
  return table.find(handle);
}

std::shared_ptr<const Window> Windows::find_address(const void* address) {
  const shm::MutexLock lock(mu);
  return table.find_address(address);
}

bool has_symmetric_support() {
  return process_faults().spec().symmetric && switches().windows && switches().cumem;
}

bool has_host_rma(Communicator& communicator) {
  return has_symmetric_support() && communicator.config().num_rma_ctx > 0;
}

std::size_t window_stride(std::size_t device_bytes) {
  const std::int64_t asked = switches().stride;
  const std::size_t bytes = asked > 0 ? static_cast<std::size_t>(asked)
                                      : std::max<std::size_t>(device_bytes, 1);
  return round_up(bytes, std::size_t{4} << 30);
}

Outcome window_register(const CommunicatorPtr& communicator, void* buff,
                        std::size_t size, ncclWindow_t* win, int flags) {
  if (win != nullptr) *win = nullptr;
  const Action fault = process_faults().next(
      OperationKind::kWindowRegister, process_faults().rank_of(communicator->rank()));
  if (const int code = failed(fault); code != 0) {
    return {static_cast<ncclResult_t>(code), "a fault was asked for: " + fault.entry};
  }
  const Request request{communicator, static_cast<std::byte*>(buff), size, win, flags};
  RegisterCall call;
  call.handle_given = win != nullptr;
  call.buffer = buff;
  call.nbytes = size;
  call.symmetric_support = has_symmetric_support() && !is_null(fault);
  call.readiness = communicator->ready().code();
  const auto [action, decision] = decide_register_call(call);
  if (action == RegisterAction::kRefuse) {
    return {decision.code, describe(request) + ": " + decision.found};
  }
  if (action == RegisterAction::kLeaveNull) return {};
  return add_step(communicator,
                  {Step::kRegister, "ncclCommWindowRegister of " + describe(request),
                   [request, fault] { return carry_out_registration(request, fault); },
                   nullptr, false});
}

Outcome window_deregister(const CommunicatorPtr& communicator, ncclWindow_t win) {
  auto& windows = communicator->part<Windows>();
  DeregisterCall call;
  call.handle_given = win != nullptr;
  const shm::MutexLock lock(windows.mu);
  call.handle_known = win != nullptr && windows.table.remove(win);
  const Decision decision = decide_deregister(call);
  return {decision.code, decision.found};
}

Outcome window_user_pointer(const CommunicatorPtr& communicator, ncclWindow_t win,
                            void** out) {
  const auto window = communicator->part<Windows>().find(win);
  UserPointerCall call;
  call.result_given = out != nullptr;
  call.symmetric_support = has_symmetric_support();
  call.handle_given = win != nullptr;
  call.handle_known = window != nullptr;
  const Decision decision = decide_user_pointer(call);
  if (decision.code != ncclSuccess) return {decision.code, decision.found};
  *out = window ? window->base : nullptr;
  return {};
}

}  // namespace weightsync::emulator::nccl
