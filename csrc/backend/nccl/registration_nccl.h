// Registration: how the tensors of all ranks become one window.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/nccl/session.h"
#include "backend/nccl/watchdog.h"
#include "shm/futex.h"

namespace weightsync {

// Where the tensor of a rank lies.
struct Place {
  std::int64_t round = 0;   // of the registration of its allocation; see nccl::Windows
  std::int64_t offset = 0;  // bytes from the start of the allocation
  std::int64_t nbytes = 0;
  std::int64_t dtype = 0;
};

// Who meets, and until when. A meeting that is not over by then ends the session.
struct Meeting {
  std::shared_ptr<Session> session;
  std::shared_ptr<Watchdog> watchdog;
  shm::Deadline deadline;
  c10::intrusive_ptr<c10d::Store> store;  // that all of them have; null: there is none
};

// Collective: registers what is not yet, and returns the places of all ranks. What is
// wrong on one rank is raised on all. Makes the first one-sided call, if there was
// none. A registration that NCCL refuses on one rank, while it keeps the others waiting
// for that rank, ends the session.
std::vector<Place> register_tensor(const Meeting& meeting, const at::Tensor& tensor);

// Collective: returns when all ranks are here, and what was issued before is over.
void meet_all(const Meeting& meeting);

}  // namespace weightsync
