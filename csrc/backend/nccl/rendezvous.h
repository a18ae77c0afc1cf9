// Rendezvous: how the members of a new configuration agree on it, through the store of
// its first member.
//
// They meet twice. Nobody touches what they have before all agreed; and when that is
// given up, which takes its time, nobody goes on to NCCL before all are there again:
// NCCL waits without an end for one that died meanwhile. Each time any member that
// cannot come calls the attempt off for all, and either all hear that or all go on. The
// keys are named by the uuid, and by what the members were told, so that nobody meets
// those who were told something else. Without the GIL; a connection to the store is
// made for each attempt, and used aside: nothing ends what a store is asked whose
// process is frozen, but who asks goes on when the attempt is given up.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/nccl/handle.h"
#include "nccl/communicator.h"

namespace weightsync {

// One attempt of one member, by one thread. After an error it is over.
class Rendezvous : public std::enable_shared_from_this<Rendezvous> {
 public:
  struct Plan {
    std::int64_t uuid = 0;
    std::vector<std::string> handles;  // by rank
    int rank = 0;
  };
  using Interrupted = nccl::Interrupted;

  // `interrupted` is asked now and then, by the thread that calls, and ends the attempt
  // by an error.
  Rendezvous(Plan plan, shm::Deadline deadline, Interrupted interrupted);

  // Returns once all have come. kInvalid if the uuid was used before.
  shm::Status agree();
  // The id that all get, once all have come again.
  shm::Result<ncclUniqueId> exchange(std::shared_ptr<const nccl::Library> library,
                                     shm::Deadline deadline);
  // Lets the others know that this member does not come.
  void refuse(const std::string& why);
  // By rank 0, when all have the id: removes what nobody needs any more. The uuid stays
  // claimed.
  void forget();

 private:
  using Bytes = std::vector<std::uint8_t>;
  using Offer = std::function<shm::Result<Bytes>()>;

  // Does it on another thread; what follows is for that one. Errors of a store are the
  // answer. If it is given up, the work goes on for as long as a store takes to answer.
  shm::Status aside(std::function<shm::Status()> work);
  void give_up(const shm::Status& why);
  shm::Status given_up() const;

  shm::Status agree_here();
  // Unless it is connected already.
  shm::Status connect();
  shm::Status claim();
  // What the first one offers, to all; or why there is nothing.
  shm::Result<Bytes> meet(const Offer& offer);
  shm::Result<Bytes> lead(const Offer& offer);
  shm::Result<Bytes> follow();
  // Whether all keys are there; an error when the time is over or it is given up.
  shm::Status await(const std::function<shm::Status(bool& done)>& look);
  shm::Result<Bytes> call_off(shm::Status why);
  shm::Result<Bytes> read(const Bytes& answer) const;
  void remove_keys();
  // Keys of the present meeting.
  std::string here(int rank) const;
  std::string answer() const;

  // Constant after construction.
  const Plan plan_;
  const Interrupted interrupted_;
  const std::string digest_;

  // Of the thread aside, while there is one.
  shm::Deadline deadline_;
  int meeting_ = 0;
  c10::intrusive_ptr<c10d::Store> store_;

  mutable std::mutex mu_;
  shm::Status given_up_;  // guarded by mu_
};

}  // namespace weightsync
