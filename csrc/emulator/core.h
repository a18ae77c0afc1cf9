// The machine of the emulator, as its three libraries share it: devices, memory,
// streams.
//
// The runtime library (libweightsync_cudart.so) holds the one machine of a process and
// exports these functions; the driver and the NCCL library link against it. The
// machine is made at first use and lives as long as the process: nothing here is ever
// destroyed at exit, so an operation that still runs then finds what it needs.
//
// Memory. Every allocation is memory of this process. Where `segment` is set, it is a
// memfd that a peer process maps with shm::Segment::open(segment->locator()); the byte
// at `base + n` is the byte `segment_offset + n` of that segment. Registered and
// pageable host memory has no segment: copy it through memory of your own. Freeing
// memory ends the registration; an Allocation that you hold keeps the segment alive,
// but for VMM memory not the mapping at `base`.
//
// Streams. A stream is a queue of operations with a thread that runs them in order. An
// operation may block, which blocks its stream and nothing else, and it must read and
// write memory when it runs, never when it is enqueued. An operation must not call
// functions that wait for a stream. Ordering with the legacy default stream is done by
// enqueue().
//
// Every function may be called from any thread, unless it says otherwise. None throws.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shm/segment.h"
#include "shm/status.h"

// cudaStream_t and CUstream are pointers to it.
struct CUstream_st;

#define WEIGHTSYNC_EMULATOR_EXPORT __attribute__((visibility("default")))

namespace weightsync::emulator {

// Multiples of this many bytes are what VMM allocations are made of, as on hardware.
inline constexpr std::size_t kVmmGranularity = std::size_t{2} << 20;

enum class Kind : std::uint8_t {
  kMalloc,          // cudaMalloc, cudaMallocAsync: refused by NCCL windows
  kVmm,             // cuMemCreate and cuMemMap, ncclMemAlloc
  kIpc,             // opened by cudaIpcOpenMemHandle: the memory of another process
  kHost,            // pinned: cudaHostAlloc, cudaMallocHost
  kHostRegistered,  // cudaHostRegister: memory of the user, without a segment
  kManaged,         // cudaMallocManaged
};

inline bool is_device_memory(Kind kind) {
  return kind == Kind::kMalloc || kind == Kind::kVmm || kind == Kind::kIpc;
}

// One allocation, or one mapping of VMM memory.
struct Allocation {
  int device = -1;  // whose memory it is; for host memory, where it was made
  Kind kind = Kind::kMalloc;
  std::byte* base = nullptr;
  std::size_t nbytes = 0;  // as asked for; VMM: as mapped
  std::shared_ptr<shm::Segment> segment;
  std::size_t segment_offset = 0;
  std::uint64_t id = 0;  // never used twice in a process
};

// What holds this address, or nothing for memory that CUDA does not know.
WEIGHTSYNC_EMULATOR_EXPORT std::optional<Allocation> find_allocation(
    const void* address);

// Whether [address, address + nbytes) lies in memory of one device or pinned memory,
// with no gap; adjacent VMM mappings of one device count as one. The message of a
// failure says where the range leaves which allocation.
WEIGHTSYNC_EMULATOR_EXPORT shm::Status check_range(const void* address,
                                                   std::size_t nbytes);

// Allocates kMalloc, kVmm (rounded up to the granularity), kHost or kManaged memory of
// zeroes and counts it. kInvalid: what was asked is wrong; kSystem: out of memory.
WEIGHTSYNC_EMULATOR_EXPORT shm::Result<Allocation> allocate(int device, Kind kind,
                                                            std::size_t nbytes);

// Frees what allocate() gave, whose base this is, at once and without waiting for
// streams. VMM mappings of cuMemMap are not freed with it.
WEIGHTSYNC_EMULATOR_EXPORT shm::Status release(void* base);

// Asked before each allocation of device memory; false makes it fail as out of memory.
// `used` is what the device holds already. One at a time; an empty one allows all.
using AllocationFilter =
    std::function<bool(int device, std::size_t used, std::size_t nbytes)>;
WEIGHTSYNC_EMULATOR_EXPORT void set_allocation_filter(AllocationFilter filter);

// What a device holds now and held at most, of its memory; for leak checks.
struct MemoryUse {
  std::size_t total = 0;
  std::size_t used = 0;
  std::size_t peak = 0;
  std::size_t allocations = 0;
};
WEIGHTSYNC_EMULATOR_EXPORT MemoryUse memory_use(int device);

// A stream, owned by the machine. Keep the pointer for as long as you need it: a
// destroyed stream still runs what is queued, and takes nothing more.
class Stream {
 public:
  virtual ~Stream() = default;

  virtual int device() const = 0;
  virtual CUstream_st* handle() const = 0;
  // Such as "device 2, stream 5" or "device 0, default stream".
  virtual std::string name() const = 0;

  // Runs `run` after everything enqueued before. `what` names the operation in
  // messages, such as "ncclAllReduce". Never blocks.
  virtual void enqueue(std::string what, std::function<void()> run) = 0;
  // The same for what neither waits nor touches memory of the program, such as the
  // recording of an event: it runs in the call where nothing is before it.
  virtual void mark(std::string what, std::function<void()> run) = 0;
  // Whether everything enqueued before has run.
  virtual bool is_idle() const = 0;
  // Waits for what is enqueued now. Not from an operation.
  virtual void synchronize() = 0;
};

// The stream of a handle: null, cudaStreamLegacy (1) and cudaStreamPerThread (2) mean
// those of the current device. Null for what is no stream.
WEIGHTSYNC_EMULATOR_EXPORT std::shared_ptr<Stream> stream_of(CUstream_st* handle);

// The stream that runs the calling operation; null elsewhere.
WEIGHTSYNC_EMULATOR_EXPORT Stream* current_stream();

// Only from an operation, before it waits: what it waits for, in words, and the place
// in the user's program that asked for it. Forgotten when the operation ends.
WEIGHTSYNC_EMULATOR_EXPORT void set_operation_note(std::string what,
                                                   const std::string& call_site);

// What a stream that is not idle does.
struct StreamReport {
  int device = -1;
  std::string stream;     // its name
  std::string operation;  // `what` of enqueue()
  std::string note;       // of set_operation_note(), or empty
  std::string call_site;  // likewise
  std::chrono::milliseconds running{0};
  std::size_t queued = 0;  // operations behind it
};
WEIGHTSYNC_EMULATOR_EXPORT std::vector<StreamReport> busy_streams();

// Devices are 0 to device_count() - 1. The current one belongs to the calling thread.
WEIGHTSYNC_EMULATOR_EXPORT int device_count();
WEIGHTSYNC_EMULATOR_EXPORT int current_device();
WEIGHTSYNC_EMULATOR_EXPORT shm::Status set_current_device(int device);

// The number of the device on the machine, where CUDA_VISIBLE_DEVICES hides or reorders
// devices: the same in all processes for one device. -1 for no device.
WEIGHTSYNC_EMULATOR_EXPORT int physical_device(int device);

// From now on every CUDA call that concerns this device fails with this cudaError, as
// after a fault of a kernel on hardware. The first one stays.
WEIGHTSYNC_EMULATOR_EXPORT void poison(int device, int cuda_error, std::string message);

// Says of a call of a function of CUDA or NCCL, before it does anything, with which
// code it fails; 0 if it goes on. One at a time; an empty one lets all go on.
using CallFilter = std::function<int(const char* function)>;
WEIGHTSYNC_EMULATOR_EXPORT void set_call_filter(CallFilter filter);
WEIGHTSYNC_EMULATOR_EXPORT int filtered_code(const char* function);

// Counts one call of a function of CUDA or NCCL; and all of them as lines of a name, a
// space and a number.
WEIGHTSYNC_EMULATOR_EXPORT void count_call(const char* function);
WEIGHTSYNC_EMULATOR_EXPORT std::string counted_calls();

// Prints "weightsync emulator: <message>" as one line on stderr.
WEIGHTSYNC_EMULATOR_EXPORT void complain(const std::string& message);

}  // namespace weightsync::emulator
