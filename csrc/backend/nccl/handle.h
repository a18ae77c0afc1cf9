// Handles: what the members of a process group give each other to be found by.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <string>

#include "shm/status.h"

namespace weightsync {

// `<host>:<port>/<prefix>`, where a TCPStore listens.
struct Address {
  std::string host;
  std::uint16_t port = 0;
  std::string prefix;

  static shm::Result<Address> parse(const std::string& text);
};

// `nccl2:<rank>:<uuid>:<instance>:<store>`.
struct Handle {
  int rank = 0;
  std::int64_t uuid = 0;
  std::string instance;  // of the process group: no other one has it
  std::string store;     // an address

  std::string text() const;
  static shm::Result<Handle> parse(const std::string& text);
};

// 16 digits.
std::string hex(std::uint64_t number);

// Of a process group: 128 random bits.
std::string new_instance();

// Where the store of a group is found by others. `server` becomes a store that listens
// on this machine alone if the group's has no address.
shm::Result<std::string> address_of(const c10::intrusive_ptr<c10d::Store>& store,
                                    c10::intrusive_ptr<c10d::Store>& server);

}  // namespace weightsync
