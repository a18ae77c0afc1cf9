#include "backend/nccl/memory_nccl.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/nccl/bootstrap.h"
#include "backend/nccl/raising.h"
#include "backend/nccl/session.h"
#include "cuda/driver.h"
#include "cuda/runtime.h"
#include "nccl/aside.h"

namespace weightsync {
namespace {

// NCCL takes no less: all of it can as well be registered.
constexpr std::size_t kGranularity = std::size_t{2} << 20;

// How long freeing a tensor waits for the device.
constexpr std::chrono::seconds kFree{5};

struct Entry {
  std::size_t bytes = 0;
  bool again = false;  // memory of another entry at one more address
  std::vector<std::weak_ptr<nccl::Windows>> users;
};

struct Table {
  std::mutex mutex;
  std::map<std::byte*, Entry> entries;  // guarded by mutex; by base
};

// Never destroyed: memory is freed until the very end of a process.
Table& table() {
  static auto* const made = new Table();
  return *made;
}

c10::Device on(int device) {
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)};
}

shm::Result<void*> allocate(std::size_t asked, int device) {
  const std::size_t bytes = (asked + kGranularity - 1) / kGranularity * kGranularity;
  const c10::DeviceGuard guard(on(device));
  auto library = library_for("");
  if (!library.ok()) return library.status();
  const nccl::Library& nccl = *library.value();
  void* made = nullptr;
  shm::Status status = nccl.check(nccl.ncclMemAlloc(&made, bytes), "ncclMemAlloc");
  if (!status.ok()) return status;
  Table& all = table();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.entries[static_cast<std::byte*>(made)] = {bytes, false, {}};
  return made;
}

// Torch takes a null pointer for "out of memory", and frees what it can before it asks
// again.
void* allocate_nccl(std::size_t asked, int device, cudaStream_t) {
  auto made = allocate(asked, device);
  if (made.ok()) return made.value();
  LOG(WARNING) << "weightsync-nccl2: no " << asked
               << " bytes for windows: " << made.status().message();
  return nullptr;
}

// On the current device. Raises nothing.
void release(void* pointer) {
  Entry entry;
  Table& all = table();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.entries.find(static_cast<std::byte*>(pointer));
    if (found == all.entries.end()) return;
    entry = std::move(found->second);
    all.entries.erase(found);
  }
  bool free = true;
  for (const auto& each : entry.users) {
    const auto windows = each.lock();
    if (windows && !windows->forget(pointer)) free = false;
  }
  if (!free) {
    LOG(WARNING) << "weightsync-nccl2: " << entry.bytes
                 << " bytes are kept: a communicator that cannot be ended uses them";
    return;
  }
  if (entry.again) {
    (void)cuda::unmap(pointer, entry.bytes);
    return;
  }
  auto library = library_for("");
  if (library.ok()) (void)library.value()->ncclMemFree(pointer);
}

void free_nccl(void* pointer, std::size_t, int device, cudaStream_t) {
  const c10::DeviceGuard guard(on(device));
  release(pointer);
}

// One wait for a device, before memory is freed.
struct Wait {
  bool over = false;
  bool late = false;
};

// The waits for a device that are beyond their time, and what was dropped meanwhile:
// they free that as well. Else each of many tensors would wait as long.
class Overdue {
 public:
  // False if no wait is beyond its time.
  bool keep(void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (waits_ == 0) return false;
    kept_.push_back(memory);
    return true;
  }

  // The time of this wait is over, and it is not, unless it has ended just now.
  void begin(Wait& wait) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (wait.over) return;
    wait.late = true;
    ++waits_;
  }

  // It is over. Returns what is to be freed when the device is idle once more.
  std::vector<void*> end(Wait& wait) {
    const std::lock_guard<std::mutex> lock(mutex_);
    wait.over = true;
    if (std::exchange(wait.late, false)) --waits_;
    return std::exchange(kept_, {});
  }

 private:
  std::mutex mutex_;
  int waits_ = 0;            // guarded by mutex_
  std::vector<void*> kept_;  // guarded by mutex_
};

// Never destroyed, as the table.
Overdue& overdue_on(int device) {
  static auto* const mutex = new std::mutex();
  static auto* const all = new std::map<int, Overdue>();
  const std::lock_guard<std::mutex> lock(*mutex);
  return (*all)[device];
}

shm::Status free_when_idle(void* memory, int device, Wait& wait) {
  const cuda::Runtime& runtime = cuda::runtime();
  shm::Status status = cuda::bind_device(device);
  std::vector<void*> all{memory};
  while (status.ok() && !all.empty()) {
    status = runtime.check(runtime.device_synchronize(), "cudaDeviceSynchronize");
    if (!status.ok()) break;
    for (void* const each : all) release(each);
    all = overdue_on(device).end(wait);
  }
  overdue_on(device).end(wait);
  return status;
}

// Torch waits for the device as well when it gives memory back. With a limit: the GIL
// may be held, and a wait for a signal may never end.
void drop(void* memory, int device) {
  Overdue& overdue = overdue_on(device);
  if (overdue.keep(memory)) return;
  const auto wait = std::make_shared<Wait>();
  const shm::Status freed =
      nccl::run_aside("freeing memory of NCCL", shm::after(kFree),
                      [=] { return free_when_idle(memory, device, *wait); });
  if (freed.ok()) return;
  overdue.begin(*wait);
  LOG(WARNING) << "weightsync-nccl2: " << freed.message();
}

// A tensor that frees this memory with its last view.
at::Tensor own(void* memory, std::int64_t size, const at::TensorOptions& options) {
  const int device = options.device().index();
  return at::for_blob(memory, {size})
      .deleter([device](void* freed) { drop(freed, device); })
      .options(options)
      .target_device(options.device())
      .make_tensor();
}

}  // namespace

std::optional<Allocation> allocation_of(const void* address) {
  Table& all = table();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto* const at = const_cast<std::byte*>(static_cast<const std::byte*>(address));
  auto found = all.entries.upper_bound(at);
  if (found == all.entries.begin()) return std::nullopt;
  --found;
  if (static_cast<std::size_t>(at - found->first) >= found->second.bytes) {
    return std::nullopt;
  }
  return Allocation{found->first, found->second.bytes};
}

void remember(const Allocation& allocation, const std::shared_ptr<nccl::Windows>& by) {
  Table& all = table();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.entries.find(allocation.base);
  if (found == all.entries.end()) return;
  auto& users = found->second.users;
  users.erase(std::remove_if(users.begin(), users.end(),
                             [](const auto& each) { return each.expired(); }),
              users.end());
  users.push_back(by);
}

at::Tensor allocate_nccl_tensor(std::int64_t size, const at::TensorOptions& options) {
  const c10::Device device = options.device();
  check(device.is_cuda() && size > 0, shm::Code::kInvalid, [&] {
    return c10::str("memory of NCCL is at least one element on a CUDA device; found ",
                    size, " elements on ", device);
  });
  const int index = device.has_index() ? device.index() : current_device().index();
  const c10::Device place = on(index);
  const std::size_t bytes = static_cast<std::size_t>(size) * options.dtype().itemsize();
  unwrap(library_for(""));  // Without one it is not memory that lacks.
  auto allocated = allocate(bytes, index);
  TORCH_CHECK_WITH(OutOfMemoryError, allocated.ok(), "NCCL has no ", bytes,
                   " bytes on ", place, ": ", allocated.status().message());
  void* const made = allocated.value();
  at::Tensor tensor = own(made, size, options.device(place));
  const c10::DeviceGuard guard(place);
  const cuda::Runtime& runtime = cuda::runtime();
  raise(runtime.check(
      runtime.memset_async(made, 0, bytes, handle_of(current_stream(place))),
      "cudaMemsetAsync"));
  return tensor;
}

at::Tensor map_nccl_tensor_again(const at::Tensor& tensor) {
  const void* const start = tensor.const_data_ptr();
  const Allocation found = allocation_of(start).value_or(Allocation{});
  check(found.base != nullptr && found.base == start, shm::Code::kInvalid,
        "only a tensor at the start of memory of NCCL can be mapped again");
  const int device = tensor.device().index();
  const c10::DeviceGuard guard(on(device));
  void* const made = unwrap(cuda::map_again(found.base, found.bytes, device));
  {
    Table& all = table();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.entries[static_cast<std::byte*>(made)] = {found.bytes, true, {}};
  }
  return own(made, tensor.numel(), tensor.options());
}

std::pair<std::uintptr_t, std::uintptr_t> nccl_memory_functions() {
  return {reinterpret_cast<std::uintptr_t>(&allocate_nccl),
          reinterpret_cast<std::uintptr_t>(&free_nccl)};
}

}  // namespace weightsync
