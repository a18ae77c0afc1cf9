// describe: a snapshot in the form that torch.distributed.flight_recorder reads.
//
// What that form has no place for, and what its analyser refuses, is in a dictionary of
// its own under the key "weightsync".
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "recorder/recorder.h"
#include "recorder/value.h"
#include "shm/status.h"

namespace weightsync::recorder {

struct Origin {
  std::int64_t rank = 0;  // in the job
  std::string reason;     // why there is a dump
  std::string library;    // version of NCCL
};

// The frames of an operation as [{"name": ..., "filename": ..., "line": ...}].
using ReadFrames = std::function<List(const Frames&)>;

Value describe(const Snapshot& snapshot, const Origin& origin,
               const ReadFrames& read_frames);

// The files of a dump. Two of the same prefix and rank replace each other.
struct Files {
  std::string pickle;  // <prefix><rank>
  std::string json;    // <prefix>json/<rank>.json: torch's reader takes every file that
                       // has the prefix in its name, and is not to find this one
};

Files files_of(const std::string& prefix, std::int64_t rank);
// Makes the folders that are missing. Only the user may read the files.
shm::Status write(const Files& files, const Value& dump);

}  // namespace weightsync::recorder
