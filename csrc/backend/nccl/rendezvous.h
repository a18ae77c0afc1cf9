// Rendezvous: how the members of a new configuration agree on it, through the store of
// its first member.
//
// They meet twice. Nobody touches what they have before all agreed; and when that is
// given up, which takes its time, nobody goes on to NCCL before all are there again:
// NCCL waits without an end for one that died meanwhile. Each time any member that
// cannot come calls the attempt off for all, and either all hear that or all go on. The
// keys are named by the uuid, and by what the members were told, so that nobody meets
// those who were told something else. Blocking, without the GIL and without locks; a
// connection to the store is made for each attempt.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "nccl/communicator.h"

namespace weightsync {

// What a member gives the others to be found by:
// `nccl2:<rank>:<uuid>:<instance>:<store>`.
struct Handle {
  int rank = 0;
  std::int64_t uuid = 0;
  std::string instance;  // of the process group: no other one has it
  std::string store;     // `<host>:<port>/<prefix>`, where a TCPStore listens

  std::string text() const;
  static shm::Result<Handle> parse(const std::string& text);
};

// Of a process group: 128 random bits.
std::string new_instance();

// Where the store of a group is found by others. `server` becomes a store that listens
// on this machine alone if the group's has no address.
shm::Result<std::string> address_of(const c10::intrusive_ptr<c10d::Store>& store,
                                    c10::intrusive_ptr<c10d::Store>& server);

// One attempt of one member.
class Rendezvous {
 public:
  struct Plan {
    std::int64_t uuid = 0;
    std::vector<std::string> handles;  // by rank
    int rank = 0;
  };
  using Interrupted = nccl::Interrupted;

  // `interrupted` is asked now and then, and ends the attempt by an error.
  Rendezvous(Plan plan, shm::Deadline deadline, Interrupted interrupted);

  // Returns once all have come. kInvalid if the uuid was used before.
  shm::Status agree();
  // The id that all get, once all have come again.
  shm::Result<ncclUniqueId> exchange(const nccl::Library& library,
                                     shm::Deadline deadline);
  // Lets the others know that this member does not come.
  void refuse(const std::string& why);
  // By rank 0, when all have the id: removes what nobody needs any more. The uuid stays
  // claimed.
  void forget();

 private:
  using Bytes = std::vector<std::uint8_t>;
  using Offer = std::function<shm::Result<Bytes>()>;

  // Unless it is connected already.
  shm::Status connect();
  shm::Status claim();
  // What the first one offers, to all; or why there is nothing.
  shm::Result<Bytes> meet(const Offer& offer);
  shm::Result<Bytes> lead(const Offer& offer);
  shm::Result<Bytes> follow();
  // Whether all keys are there; an error when the time is over or it is interrupted.
  shm::Status await(const std::function<shm::Status(bool& done)>& look);
  shm::Result<Bytes> call_off(shm::Status why);
  shm::Result<Bytes> read(const Bytes& answer) const;
  // Keys of the present meeting.
  std::string here(int rank) const;
  std::string answer() const;

  const Plan plan_;
  const Interrupted interrupted_;
  const std::string digest_;
  shm::Deadline deadline_;
  int meeting_ = 0;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace weightsync
