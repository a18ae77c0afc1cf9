// Faults where an operation executes: as emulator/faults.h carries them out, and a
// stall is diagnosed like any other hang.
#pragma once

#include "emulator/faults.h"
#include "emulator/nccl/operation.h"

namespace weightsync::emulator::nccl {

class Communicator;

// Whether the operation shall execute. A stall lasts until the communicator is aborted,
// or for ever. An error is one of the communicator, and such a stall. Blocks; on a
// stream or on the host.
bool carry_out_watched(Communicator& communicator, const Action& fault,
                       OnAbort on_abort = OnAbort::kReturn);
// The same for a call without a communicator.
bool carry_out_watched(const Action& fault);

}  // namespace weightsync::emulator::nccl
