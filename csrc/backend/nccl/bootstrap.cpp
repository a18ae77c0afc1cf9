#include "backend/nccl/bootstrap.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace weightsync {
namespace {

using nccl::Communicator;
using nccl::Library;
using nccl::Result;
using shm::Code;
using shm::Deadline;
using shm::Status;

// In front of what rank 0 leaves for the others.
constexpr std::uint8_t kId = 1;
constexpr std::uint8_t kError = 0;
constexpr std::chrono::milliseconds kLongestPause{20};

// Lets the others know why there is no id, so that they need not wait for it.
Result<ncclUniqueId> offer(c10d::Store& store, const std::string& key, int size,
                           const Library& library) {
  auto made = nccl::make_unique_id(library);
  if (size == 1) return made;
  std::vector<std::uint8_t> bytes;
  if (made.ok()) {
    const auto* const id = reinterpret_cast<const std::uint8_t*>(made.value().internal);
    bytes.push_back(kId);
    bytes.insert(bytes.end(), id, id + kNcclUniqueIdBytes);
  } else {
    const std::string& why = made.status().message();
    bytes.push_back(kError);
    bytes.insert(bytes.end(), why.begin(), why.end());
  }
  store.set(key, bytes);
  return made;
}

// The last one to have read it removes the key: a later group may have the same name.
void have_read(c10d::Store& store, const std::string& key, int readers) {
  try {
    if (store.add(key + "/read", 1) < readers) return;
    store.deleteKey(key);
    store.deleteKey(key + "/read");
  } catch (const std::exception&) {
    // Not every store can.
  }
}

// Asks now and then. Who waits inside of the store keeps everybody else off its
// connection, and a new connection is dear: the server asks for the name of the host.
Status await(c10d::Store& store, const std::string& key, Deadline deadline,
             const nccl::Interrupted& interrupted) {
  std::chrono::milliseconds pause{1};
  while (!store.check({key})) {
    Status why = interrupted();
    if (!why.ok()) return why;
    if (shm::Clock::now() >= deadline) {
      return {Code::kTimedOut, "rank 0 left no id for the communicator under the key " +
                                   key + " of the store"};
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return {};
}

Result<ncclUniqueId> take(c10d::Store& store, const std::string& key, int size,
                          Deadline deadline, const nccl::Interrupted& interrupted) {
  std::vector<std::uint8_t> bytes;
  try {
    Status status = await(store, key, deadline, interrupted);
    if (!status.ok()) return status;
    bytes = store.get(key);
  } catch (const std::exception& error) {
    return Status{Code::kPeer,
                  std::string("the store of the process group: ") + error.what()};
  }
  have_read(store, key, size - 1);
  if (bytes.empty() || bytes.front() != kId) {
    const std::string why(bytes.begin() + (bytes.empty() ? 0 : 1), bytes.end());
    return Status{Code::kPeer, "rank 0 could not make a communicator: " + why};
  }
  ncclUniqueId id{};
  std::memcpy(id.internal, bytes.data() + 1,
              std::min(bytes.size() - 1, kNcclUniqueIdBytes));
  return id;
}

}  // namespace

Result<std::shared_ptr<const Library>> library_for(const std::string& path) {
  static std::mutex mutex;
  static auto* const opened =
      new std::map<std::string, std::shared_ptr<const Library>>();  // guarded by mutex
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = opened->find(path);
  if (found != opened->end()) return found->second;
  auto made = Library::open(path, "");
  if (made.ok()) opened->emplace(path, made.value());
  return made;
}

Result<Communicator::Pointer> meet(c10d::Store& store, const std::string& key,
                                   const std::shared_ptr<const Library>& library,
                                   const Communicator::Place& place,
                                   const nccl::Config& config, Deadline deadline,
                                   const nccl::Interrupted& interrupted) {
  auto id = place.rank == 0 ? offer(store, key, place.size, *library)
                            : take(store, key, place.size, deadline, interrupted);
  if (!id.ok()) return id.status();
  return Communicator::create(library, id.value(), place, config, deadline,
                              interrupted);
}

}  // namespace weightsync
