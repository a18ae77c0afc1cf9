#include "emulator/nccl/bootstrap.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <list>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <utility>

#include "emulator/core.h"
#include "emulator/nccl/config.h"
#include "emulator/nccl/diagnosis.h"
#include "emulator/nccl/environment.h"
#include "emulator/nccl/group.h"
#include "emulator/nccl/shared_segments.h"

namespace weightsync::emulator::nccl {
namespace {

using SegmentPtr = std::shared_ptr<shm::Segment>;

constexpr std::uint64_t kIdMagic = 0x31304449434e5357;  // "WSNCID01"
constexpr std::chrono::milliseconds kLook{50};

// The bytes of an ncclUniqueId.
struct IdContent {
  std::uint64_t magic;
  std::uint64_t token;  // identity of the communicator
  std::uint64_t generation;
  shm::Locator board;
};
static_assert(sizeof(IdContent) <= kNcclUniqueIdBytes);

// What one rank says; complete once `ready`.
struct Entry {
  std::atomic<std::uint32_t> claimed;
  std::atomic<std::uint32_t> ready;
  std::int64_t pid;
  std::int32_t device;
  std::int32_t version;
  shm::Locator control;
};

struct Board {
  shm::Doorbell bell;
  std::atomic<std::uint32_t> size;      // of the communicator; the first rank says it
  std::atomic<std::uint32_t> failed;    // a rank gave up
  std::atomic<std::uint32_t> finished;  // ranks that are through
  Entry entries[kMaxRanks];
};

// The boards of this process, as long as they are needed. Never destroyed.
struct Boards {
  std::mutex mutex;
  std::list<SegmentPtr> open;
};

Boards& boards() {
  static Boards* const instance = new Boards;
  return *instance;
}

Board& board_in(const SegmentPtr& segment) {
  return *reinterpret_cast<Board*>(segment->data());
}

// Nobody needs it any more: all ranks are through, or nothing comes of it.
bool is_through(const SegmentPtr& segment) {
  const Board& board = board_in(segment);
  if (board.failed.load() != 0) return true;
  const std::uint32_t size = board.size.load();
  return size != 0 && board.finished.load() >= size;
}

void drop_finished_boards() {
  Boards& all = boards();
  const std::lock_guard lock(all.mutex);
  all.open.remove_if(is_through);
}

std::uint64_t random_token() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) | device() | 1;
}

IdContent content_of(const ncclUniqueId& id) {
  IdContent content{};
  std::memcpy(&content, id.internal, sizeof content);
  return content;
}

Outcome not_an_id() {
  return invalid_argument("the unique id was not made by ncclGetUniqueId");
}

// One rank at its board.
class Joining {
 public:
  Joining(Communicator& communicator, const IdContent& id, SegmentPtr board)
      : communicator_(communicator),
        id_(id),
        segment_(std::move(board)),
        board_(board_in(segment_)) {}

  Outcome run() {
    Outcome outcome = enter();
    if (outcome.ok()) outcome = await_entries();
    if (outcome.ok()) outcome = check_entries();
    if (outcome.ok()) outcome = connect();
    if (!outcome.ok()) board_.failed.store(1);
    board_.finished.fetch_add(1);
    board_.bell.ring();
    if (outcome.ok()) outcome = await_everybody();
    if (outcome.ok() && board_.failed.load() != 0) {
      outcome = {ncclRemoteError, "another rank could not connect"};
    }
    drop_finished_boards();
    return outcome;
  }

 private:
  std::uint32_t size() const {
    return static_cast<std::uint32_t>(communicator_.size());
  }
  Entry& entry(int rank) { return board_.entries[rank]; }

  Outcome enter() {
    std::uint32_t size_there = 0;
    if (!board_.size.compare_exchange_strong(size_there, size()) &&
        size_there != size()) {
      return invalid_usage("this rank says " + std::to_string(size()) +
                           " ranks, another one said " + std::to_string(size_there));
    }
    Entry& mine = entry(communicator_.rank());
    if (mine.claimed.exchange(1) != 0) {
      return invalid_usage("rank " + std::to_string(communicator_.rank()) +
                           " has joined with this unique id before; an id serves one "
                           "communicator");
    }
    shm::Result<SegmentPtr> control = make_control();
    if (!control.ok()) return {ncclSystemError, control.status().message()};
    control_ = control.take();
    mine.pid = ::getpid();
    mine.device = physical_device(communicator_.device());
    mine.version = emulated_version();
    mine.control = control_->locator();
    mine.ready.store(1, std::memory_order_release);
    board_.bell.ring();
    return {};
  }

  // There is no control segment to look into yet.
  diagnosis::Blocked blocked(const char* what) {
    const char* const function = current_call().function;
    return {[this] { return communicator_.describe(); },
            [function, what] { return std::string(function) + "; waits for " + what; },
            [this] { return missing_ranks(); },
            {}};
  }

  std::vector<std::string> missing_ranks() {
    std::vector<std::string> lines;
    for (int rank = 0; rank < communicator_.size(); ++rank) {
      if (entry(rank).ready.load() != 0) continue;
      lines.push_back("rank " + std::to_string(rank) + " has not joined");
    }
    return lines;
  }

  // Until the condition holds, or it never will.
  Outcome wait(const char* what, const std::function<bool()>& condition) {
    const diagnosis::Guard guard(blocked(what));
    const shm::Doorbell::Waiting waiting(board_.bell);
    for (;;) {
      const std::uint32_t seen = board_.bell.count();
      Outcome lost = find_lost();
      if (condition()) return {};
      if (!lost.ok()) return lost;
      if (communicator_.aborted()) {
        return {ncclInternalError, "the communicator was aborted while it was made"};
      }
      board_.bell.wait(seen, shm::after(kLook));
    }
  }

  // Whoever the others wait for in vain.
  Outcome find_lost() {
    if (board_.failed.load() != 0) {
      return {ncclRemoteError, "another rank could not join"};
    }
    for (int rank = 0; rank < communicator_.size(); ++rank) {
      if (entry(rank).ready.load(std::memory_order_acquire) == 0) continue;
      if (!is_process_gone(entry(rank).pid)) continue;
      return {ncclRemoteError, "rank " + std::to_string(rank) + " (process " +
                                   std::to_string(entry(rank).pid) +
                                   ") died while the communicator was made"};
    }
    if (is_process_gone(id_.board.pid)) {
      return {ncclRemoteError, "the process that made the unique id (" +
                                   std::to_string(id_.board.pid) + ") is gone"};
    }
    return {};
  }

  Outcome await_entries() {
    return wait("all ranks to join the communicator", [this] {
      for (int rank = 0; rank < communicator_.size(); ++rank) {
        if (entry(rank).ready.load(std::memory_order_acquire) == 0) return false;
      }
      return true;
    });
  }

  Outcome check_entries() {
    for (int rank = 0; rank < communicator_.size(); ++rank) {
      members_.devices.push_back(entry(rank).device);
      members_.processes.push_back(entry(rank).pid);
      locators_.push_back(entry(rank).control);
      if (entry(rank).version != emulated_version()) {
        return invalid_usage("rank " + std::to_string(rank) + " has NCCL " +
                             std::to_string(entry(rank).version) + ", this rank " +
                             std::to_string(emulated_version()));
      }
    }
    return check_devices(members_.devices);
  }

  Outcome connect() {
    std::vector<SegmentPtr> controls;
    Outcome opened = open_controls(locators_, communicator_.rank(), control_, controls);
    if (!opened.ok()) return opened;
    members_.identity = id_.token;
    communicator_.connect(std::move(members_), std::move(controls),
                          std::make_shared<Serial>());
    return {};
  }

  Outcome await_everybody() {
    return wait("all ranks to connect",
                [this] { return board_.finished.load() >= size(); });
  }

  Communicator& communicator_;
  const IdContent id_;
  const SegmentPtr segment_;
  Board& board_;
  SegmentPtr control_;
  Membership members_;
  std::vector<shm::Locator> locators_;
};

}  // namespace

Outcome make_unique_id(std::uint64_t generation, ncclUniqueId& id) {
  if (!environment("NCCL_COMM_ID").empty()) {
    return invalid_usage("NCCL_COMM_ID is set; the emulator has no network to use it");
  }
  drop_finished_boards();
  shm::Result<SegmentPtr> board = create_shared(sizeof(Board));
  if (!board.ok()) return {ncclSystemError, board.status().message()};
  const IdContent content{kIdMagic, random_token(), generation,
                          board.value()->locator()};
  std::memset(&id, 0, sizeof id);
  std::memcpy(id.internal, &content, sizeof content);
  Boards& all = boards();
  const std::lock_guard lock(all.mutex);
  all.open.push_back(board.take());
  return {};
}

Outcome read_generation(const ncclUniqueId& id, std::uint64_t& generation) {
  const IdContent content = content_of(id);
  if (content.magic != kIdMagic) return not_an_id();
  generation = content.generation;
  return {};
}

void spend_unique_id(const ncclUniqueId& id) {
  shm::Result<SegmentPtr> board = open_shared(content_of(id).board);
  if (!board.ok()) return;
  board_in(board.value()).size.store(1);
  board_in(board.value()).finished.store(1);
  drop_finished_boards();
}

Outcome join(Communicator& communicator, const ncclUniqueId& id) {
  const IdContent content = content_of(id);
  if (content.magic != kIdMagic || content.board.nbytes != sizeof(Board)) {
    return not_an_id();
  }
  shm::Result<SegmentPtr> board = open_shared(content.board);
  if (!board.ok()) {
    return {ncclRemoteError,
            "the board of the unique id is not there (its process " +
                std::to_string(content.board.pid) +
                " ended, or the id was used before): " + board.status().message()};
  }
  return Joining(communicator, content, board.take()).run();
}

shm::Result<SegmentPtr> make_control() {
  shm::Result<SegmentPtr> segment = create_shared(sizeof(Control));
  if (!segment.ok()) return segment;
  // All its fields start as zeroes.
  auto* const control = reinterpret_cast<Control*>(segment.value()->data());
  control->magic = kControlMagic;
  control->pid = ::getpid();
  return segment;
}

Outcome open_controls(const std::vector<shm::Locator>& locators, int rank,
                      const SegmentPtr& mine, std::vector<SegmentPtr>& controls) {
  for (std::size_t i = 0; i < locators.size(); ++i) {
    if (static_cast<int>(i) == rank) {
      controls.push_back(mine);
      continue;
    }
    shm::Result<SegmentPtr> peer = open_shared(locators[i]);
    if (!peer.ok()) {
      return {ncclRemoteError,
              "rank " + std::to_string(i) + ": " + peer.status().message()};
    }
    controls.push_back(peer.take());
  }
  return {};
}

constexpr int kSharedGpusFrom = 23000;

Outcome check_devices(const std::vector<int>& devices) {
  const bool known = emulated_version() >= kSharedGpusFrom;
  if (known && environment("NCCL_MULTI_RANK_GPU_ENABLE") == "1") return {};
  for (std::size_t i = 0; i < devices.size(); ++i) {
    for (std::size_t k = 0; k < i; ++k) {
      if (devices[i] != devices[k]) continue;
      return invalid_usage("ranks " + std::to_string(k) + " and " + std::to_string(i) +
                           " both use GPU " + std::to_string(devices[i]) +
                           (known ? "; NCCL_MULTI_RANK_GPU_ENABLE=1 would allow it"
                                  : "; from 2.30 on there is a way to allow it"));
    }
  }
  return {};
}

}  // namespace weightsync::emulator::nccl
