// Bootstrap: how ranks that share nothing but a unique id find each other.
//
// The process that makes an id keeps a board for it: shared memory whose Locator lies
// in the id. Every rank enters itself there, once, and leaves when all ranks have
// mapped each other's control segment. One id serves one communicator. When the
// process of the board dies before that, the ranks get 6. Any thread may call anything.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "emulator/nccl/comm.h"
#include "emulator/nccl/outcome.h"
#include "nccl/abi.h"

namespace weightsync::emulator::nccl {

// A board and its id. `generation` binds the id to one grow of one communicator; 0 is
// for ncclCommInitRank.
Outcome make_unique_id(std::uint64_t generation, ncclUniqueId& id);

// What an id is for, or 4 if it was not made by make_unique_id.
Outcome read_generation(const ncclUniqueId& id, std::uint64_t& generation);

// Marks an id as used without joining (ncclCommInitRankScalable needs only one of its
// ids).
void spend_unique_id(const ncclUniqueId& id);

// Blocks until all ranks have come, and connects the communicator: rank, size and
// device are its own. Ends early with 6 if a rank or the board died, with 5 if the
// ranks do not fit together (size, rank twice, one GPU twice, other version), with 3
// if aborted.
Outcome join(Communicator& communicator, const ncclUniqueId& id);

// A control segment for a rank, ready for its peers.
shm::Result<std::shared_ptr<shm::Segment>> make_control();
// Those of all ranks, by rank, opened; `mine` is the segment of `rank`.
Outcome open_controls(const std::vector<shm::Locator>& locators, int rank,
                      const std::shared_ptr<shm::Segment>& mine,
                      std::vector<std::shared_ptr<shm::Segment>>& controls);

// 5 if two of these devices are the same and NCCL_MULTI_RANK_GPU_ENABLE is not 1.
Outcome check_devices(const std::vector<int>& devices);

}  // namespace weightsync::emulator::nccl
