// Operation: what the flight recorder keeps of one call.
//
// Plain values: whoever records fills one in, the recorder numbers it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace weightsync::recorder {

enum class Kind : std::uint8_t {
  kCollective,
  kPointToPoint,
  kOneSided,   // put, signal, wait_signal
  kMembership  // reconfigure, shrink, split
};

enum class State : std::uint8_t { kScheduled, kStarted, kCompleted, kFailed };

// A process group between two changes of its members: after a change it is another one.
struct Group {
  std::uint64_t id = 0;  // within this process
  std::string name;
  std::string description;
  std::vector<std::int64_t> ranks;  // the ranks of the job that are its members
  int rank = 0;                     // this process among them

  // Numbers of the last collectives, kept by the recorder.
  std::int64_t enqueued = 0;
  std::int64_t completed = 0;
};

using GroupPointer = std::shared_ptr<Group>;

struct Tensor {
  std::uint32_t dimensions = 0;
  bool is_output = false;
  const char* dtype = "";  // constant text
};

// Where a call was made, in a form that only whoever recorded it can read.
using Frames = std::shared_ptr<const void>;

struct Operation {
  Kind kind = Kind::kCollective;
  State state = State::kScheduled;
  const char* name = "";  // constant text
  GroupPointer group;     // never null

  // Of collectives, counted alike by all ranks of the group, from 1; a batch is one.
  std::int64_t collective = 0;
  // Of sends and receives, from 1; a batch is one.
  std::int64_t point_to_point = 0;
  // Of all calls, those inside of a batch too.
  std::int64_t call = 0;
  // The other rank of a send, a receive or a one-sided call, in the group; else -1.
  int peer = -1;
  // Sends to this peer, receives from it, signals to it, or signals of it that are
  // consumed, with this call: what the peer's number is held against.
  std::int64_t with_peer = 0;
  // In the window of the peer.
  std::int64_t offset = 0;
  std::int64_t bytes = 0;

  std::vector<Tensor> tensors;
  std::vector<std::int64_t> sizes;  // of all tensors, one after the other
  Frames frames;
  std::int64_t timeout_ms = 0;
  int thread = 0;
  bool is_batch = false;  // the end of a batch, which stands for all of it

  // Given by the recorder; nanoseconds since 1970, 0 before it happens.
  std::uint64_t id = 0;
  std::int64_t created_ns = 0;
  std::int64_t started_ns = 0;
  std::int64_t finished_ns = 0;

  void add(const std::int64_t* first, std::size_t dimensions, const char* dtype,
           bool is_output) {
    tensors.push_back({static_cast<std::uint32_t>(dimensions), is_output, dtype});
    sizes.insert(sizes.end(), first, first + dimensions);
  }
};

}  // namespace weightsync::recorder
