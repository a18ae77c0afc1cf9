// Growing a communicator: its id travels to the old ranks through their control
// segments, to the new ones through the user.
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "emulator/core.h"
#include "emulator/nccl/bootstrap.h"
#include "emulator/nccl/diagnosis.h"
#include "emulator/nccl/group.h"
#include "emulator/nccl/hash.h"
#include "emulator/nccl/lifecycle.h"
#include "emulator/nccl/shared_segments.h"

namespace weightsync::emulator::nccl {
namespace {

constexpr std::chrono::milliseconds kLook{50};

// What binds an id to the next child of this communicator.
std::uint64_t generation_of(const Communicator& parent, std::uint64_t child) {
  return hash({parent.members().identity, kGrowKey, child});
}

// The rank that has posted the id of this child, or -1.
int find_post(Communicator& parent, std::uint64_t child) {
  for (int rank = 0; rank < parent.size(); ++rank) {
    const GrowthPost& post = parent.control(rank).growth;
    if (post.generation.load(std::memory_order_acquire) == child + 1) return rank;
  }
  return -1;
}

bool is_anybody_gone(Communicator& parent) {
  for (int rank = 0; rank < parent.size(); ++rank) {
    const Control& peer = parent.control(rank);
    if (peer.gone.load() != 0 || is_process_gone(peer.pid)) return true;
  }
  return false;
}

// Blocks until some rank has called ncclCommGetUniqueId for this child.
Outcome await_id(Communicator& parent, std::uint64_t child, ncclUniqueId& id) {
  const diagnosis::Guard guard(parent, [] {
    return std::string("for a rank to call ncclCommGetUniqueId on this communicator");
  });
  shm::Doorbell& bell = parent.control().doorbell;
  const shm::Doorbell::Waiting waiting(bell);
  for (;;) {
    const std::uint32_t seen = bell.count();
    const bool gone = is_anybody_gone(parent);
    if (const int rank = find_post(parent, child); rank >= 0) {
      std::memcpy(id.internal, parent.control(rank).growth.id, sizeof id.internal);
      return {};
    }
    if (parent.aborted()) return {ncclInternalError, "aborted while it grew"};
    if (gone) return {ncclRemoteError, "a rank left before the communicator grew"};
    bell.wait(seen, shm::after(kLook));
  }
}

Outcome check_old_rank(const Communicator& parent, int nranks, int rank,
                       const ncclUniqueId* id) {
  if (nranks <= parent.size()) {
    return invalid_argument("to grow from " + std::to_string(parent.size()) + " to " +
                            std::to_string(nranks) + " ranks");
  }
  if (rank != -1) {
    return invalid_argument(
        "a rank of the old communicator passes -1 for its rank, "
        "not " +
        std::to_string(rank));
  }
  if (parent.size() == 1 && id == nullptr) {
    return invalid_argument("the only rank of a communicator has to pass the id");
  }
  return {};
}

Outcome check_generation(const ncclUniqueId& id, std::uint64_t wanted) {
  std::uint64_t found = 0;
  if (Outcome read = read_generation(id, found); !read.ok()) return read;
  if (found == wanted) return {};
  return invalid_argument("the unique id is of another communicator, or an old one");
}

Outcome grow_old(const CommunicatorPtr& parent, int nranks, const ncclUniqueId* given,
                 ncclComm_t* newcomm, Config config) {
  const std::uint64_t number = parent->next_child();
  const std::uint64_t wanted = generation_of(*parent, number);
  ncclUniqueId id{};
  const bool boundary = parent->rank() == 0 || parent->rank() == parent->size() - 1;
  if (given != nullptr) {
    id = *given;
    if (Outcome right = check_generation(id, wanted); !right.ok()) return right;
  } else if (boundary) {
    if (Outcome there = await_id(*parent, number, id); !there.ok()) return there;
  }
  const CommunicatorPtr child =
      Communicator::create(parent->rank(), nranks, parent->device(), std::move(config));
  *newcomm = child->handle();
  HostStep step = creation_step(child, id, newcomm, OperationKind::kGrow);
  if (given == nullptr && !boundary) {
    step.run = [parent, child, number]() -> Outcome {
      Outcome fault = meet_fault(OperationKind::kGrow, *child);
      if (!fault.ok()) return fault;
      ncclUniqueId later{};
      if (Outcome there = await_id(*parent, number, later); !there.ok()) return there;
      return join(*child, later);
    };
  }
  return add_step(child, std::move(step));
}

Outcome grow_new(int nranks, const ncclUniqueId* id, int rank, ncclComm_t* newcomm,
                 Config config) {
  std::uint64_t generation = 0;
  if (id == nullptr) return invalid_argument("a new rank has to pass the unique id");
  if (rank < 0 || rank >= nranks) {
    return invalid_argument("rank " + std::to_string(rank) + " of " +
                            std::to_string(nranks));
  }
  if (Outcome read = read_generation(*id, generation); !read.ok()) return read;
  if (generation == 0) {
    return invalid_argument("the unique id was not made by ncclCommGetUniqueId");
  }
  const CommunicatorPtr child =
      Communicator::create(rank, nranks, current_device(), std::move(config));
  *newcomm = child->handle();
  return add_step(child, creation_step(child, *id, newcomm, OperationKind::kGrow));
}

}  // namespace

Outcome unique_id_for_growth(const CommunicatorPtr& parent, ncclUniqueId* id) {
  if (id == nullptr) return invalid_argument("the unique id is NULL");
  if (Outcome ready = parent->ready(); !ready.ok()) return ready;
  const std::uint64_t child = parent->children();
  Outcome made = make_unique_id(generation_of(*parent, child), *id);
  if (!made.ok()) return made;
  GrowthPost& post = parent->control().growth;
  std::memcpy(post.id, id->internal, sizeof post.id);
  post.generation.store(child + 1, std::memory_order_release);
  for (int rank = 0; rank < parent->size(); ++rank) parent->ring(rank);
  return {};
}

Outcome grow(const CommunicatorPtr& parent, int nranks, const ncclUniqueId* id,
             int rank, ncclComm_t* newcomm, const ncclConfig_t* config) {
  if (newcomm == nullptr || nranks <= 0) {
    return invalid_argument("to grow to " + std::to_string(nranks) +
                            " ranks, or the new communicator is NULL");
  }
  if (nranks > kMaxRanks) {
    return invalid_usage(std::to_string(nranks) + " ranks; the emulator has at most " +
                         std::to_string(kMaxRanks));
  }
  if (parent) {
    if (Outcome ready = parent->ready(); !ready.ok()) return ready;
    Outcome right = check_old_rank(*parent, nranks, rank, id);
    if (!right.ok()) return right;
  }
  *newcomm = nullptr;
  Config parsed;
  const Config base = parent ? parent->config() : Config();
  if (Outcome found = parse_config(config, base, parsed); !found.ok()) return found;
  if (parent) return grow_old(parent, nranks, id, newcomm, std::move(parsed));
  return grow_new(nranks, id, rank, newcomm, std::move(parsed));
}

}  // namespace weightsync::emulator::nccl
