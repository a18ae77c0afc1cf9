// CUDA runtime: memory pools. Every allocation is made and given back at once, so a
// pool keeps nothing; its attributes can be set and read.
#include <array>
#include <map>

#include "api.h"

namespace weightsync::emulator {
namespace {

constexpr int kAttributes = 9;

struct Pool {
  int device = 0;
  std::array<std::uint64_t, kAttributes> attributes{};
};

// The pools of this process; those of devices come first, as they are asked for.
class Pools {
 public:
  cudaMemPool_t of_device(int device) {
    const shm::MutexLock lock(mu_);
    std::unique_ptr<Pool>& pool = by_device_[device];
    if (pool == nullptr) pool = make(device);
    return handle(*pool);
  }
  cudaMemPool_t create(int device) {
    const shm::MutexLock lock(mu_);
    std::unique_ptr<Pool> pool = make(device);
    auto* const made = handle(*pool);
    created_[made] = std::move(pool);
    return made;
  }
  bool destroy(cudaMemPool_t pool) {
    const shm::MutexLock lock(mu_);
    return created_.erase(pool) > 0;
  }

  // Calls `use` with the pool under the lock; false: there is no such pool.
  template <class Use>
  bool with(cudaMemPool_t wanted, Use use) {
    const shm::MutexLock lock(mu_);
    const auto found = created_.find(wanted);
    if (found != created_.end()) {
      use(*found->second);
      return true;
    }
    for (const auto& [device, pool] : by_device_) {
      if (pool != nullptr && handle(*pool) == wanted) {
        use(*pool);
        return true;
      }
    }
    return false;
  }

 private:
  static std::unique_ptr<Pool> make(int device) {
    auto pool = std::make_unique<Pool>();
    pool->device = device;
    pool->attributes = {0, 1, 1, 1};
    return pool;
  }
  static cudaMemPool_t handle(Pool& pool) {
    return reinterpret_cast<cudaMemPool_t>(&pool);
  }

  shm::Mutex mu_;
  std::map<int, std::unique_ptr<Pool>> by_device_ WEIGHTSYNC_GUARDED_BY(mu_);
  std::map<cudaMemPool_t, std::unique_ptr<Pool>> created_ WEIGHTSYNC_GUARDED_BY(mu_);
};

Pools& pools() {
  static auto* const of_process = new Pools();
  return *of_process;
}

// The first three attributes are ints, the others 64 bits.
bool is_int(int attribute) {
  return attribute <= cudaMemPoolReuseAllowInternalDependencies;
}

bool is_use(int attribute) {
  return attribute >= cudaMemPoolAttrReservedMemCurrent &&
         attribute <= cudaMemPoolAttrUsedMemHigh;
}

std::uint64_t use_of(Machine& it, int device, int attribute) {
  const MemoryUse use = it.memory().use(device);
  const bool high = attribute == cudaMemPoolAttrReservedMemHigh ||
                    attribute == cudaMemPoolAttrUsedMemHigh;
  return high ? use.peak : use.used;
}

template <class Use>
cudaError_t on_pool(const char* function, cudaMemPool_t pool, Use use) {
  return on_device(function, [&](Machine& it, int) -> Outcome {
    if (pools().with(pool, [&](Pool& found) { use(it, found); })) return {};
    return invalid(show(pool) + " is no memory pool");
  });
}

bool is_attribute(int attribute, const void* value) {
  return attribute >= 1 && attribute < kAttributes && value != nullptr;
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  Outcome usable = machine().check(device);
  if (usable.ok() && pool == nullptr) usable = missing("memPool");
  if (usable.ok()) *pool = pools().of_device(device);
  return finish(__func__, usable);
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
  return cudaDeviceGetDefaultMemPool(pool, device);
}

cudaError_t cudaDeviceSetMemPool(int, cudaMemPool_t pool) {
  return on_pool(__func__, pool, [](Machine&, Pool&) {});
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* props) {
  return on_device(__func__, [&](Machine& it, int) -> Outcome {
    if (pool == nullptr || props == nullptr) return missing("an argument");
    if (Outcome usable = it.check(props->location.id); !usable.ok()) return usable;
    *pool = pools().create(props->location.id);
    return {};
  });
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  return on_device(__func__, [&](Machine&, int) -> Outcome {
    if (pools().destroy(pool)) return {};
    return invalid(show(pool) + " is no memory pool that was created");
  });
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, int attribute, void* value) {
  if (!is_attribute(attribute, value)) {
    return finish(__func__,
                  invalid("pools have no attribute " + std::to_string(attribute)));
  }
  return on_pool(__func__, pool, [&](Machine& it, Pool& found) {
    std::uint64_t number = found.attributes[attribute];
    if (is_use(attribute)) number = use_of(it, found.device, attribute);
    if (is_int(attribute)) {
      *static_cast<int*>(value) = static_cast<int>(number);
    } else {
      *static_cast<std::uint64_t*>(value) = number;
    }
  });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, int attribute, void* value) {
  if (!is_attribute(attribute, value)) {
    return finish(__func__,
                  invalid("pools have no attribute " + std::to_string(attribute)));
  }
  return on_pool(__func__, pool, [&](Machine&, Pool& found) {
    found.attributes[attribute] =
        is_int(attribute) ? static_cast<std::uint64_t>(*static_cast<int*>(value))
                          : *static_cast<std::uint64_t*>(value);
  });
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t) {
  return on_pool(__func__, pool, [](Machine&, Pool&) {});
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc*,
                                 std::size_t) {
  return on_pool(__func__, pool, [](Machine&, Pool&) {});
}

cudaError_t cudaMemPoolGetAccess(int* flags, cudaMemPool_t pool, cudaMemLocation*) {
  constexpr int kReadWrite = 3;
  return on_pool(__func__, pool, [&](Machine&, Pool&) {
    if (flags != nullptr) *flags = kReadWrite;
  });
}

cudaError_t cudaDeviceGetGraphMemAttribute(int, int, void* value) {
  if (value == nullptr) return finish(__func__, missing("value"));
  *static_cast<std::uint64_t*>(value) = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceSetGraphMemAttribute(int, int, void*) { return cudaSuccess; }
cudaError_t cudaDeviceGraphMemTrim(int) { return cudaSuccess; }

}  // extern "C"
#pragma GCC visibility pop
