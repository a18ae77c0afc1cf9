// Rendezvous: how the members of a new configuration agree on it, through the store of
// its first member.
//
// Nobody touches what they have before all agreed: any member that cannot come calls
// the attempt off for all, and either all hear that or all get the same id. The keys
// are named by the uuid, and by what the members were told, so that nobody meets those
// who were told something else. Blocking, without the GIL and without locks; a
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
  using Interrupted = std::function<shm::Status()>;

  // `interrupted` is asked now and then, and ends the attempt by an error.
  Rendezvous(Plan plan, shm::Deadline deadline, Interrupted interrupted);

  // The id that all get, once all have come. kInvalid if the uuid was used before.
  shm::Result<ncclUniqueId> agree(const nccl::Library& library);
  // Lets the others know that this member does not come.
  void refuse(const std::string& why);
  // By rank 0, when all have the id: removes what nobody needs any more. The uuid stays
  // claimed.
  void forget();

 private:
  using Bytes = std::vector<std::uint8_t>;

  void connect();
  shm::Result<ncclUniqueId> lead(const nccl::Library& library);
  shm::Result<ncclUniqueId> follow();
  // Whether all keys are there; an error when the time is over or it is interrupted.
  shm::Status await(const std::function<shm::Status(bool& done)>& look);
  shm::Result<ncclUniqueId> call_off(shm::Status why);
  shm::Result<ncclUniqueId> read(const Bytes& answer) const;
  std::string here(int rank) const;

  const Plan plan_;
  const shm::Deadline deadline_;
  const Interrupted interrupted_;
  const std::string digest_;
  const std::string answer_;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace weightsync
