// Switches: environment variables that decide about memory, windows and one-sided
// operations; read at each use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weightsync::emulator::nccl {

struct Switches {
  bool cumem = true;         // NCCL_CUMEM_ENABLE: 0 makes ncclMemAlloc a cudaMalloc
  bool windows = true;       // NCCL_WIN_ENABLE
  bool elastic = true;       // NCCL_ELASTIC_BUFFER_REGISTER: several segments a window
  std::int64_t stride = -1;  // NCCL_WIN_STRIDE: address space for one rank's windows
  // WEIGHTSYNC_EMULATOR_STRICT: refuse what NCCL lets pass and then goes wrong.
  bool strict = false;
  // WEIGHTSYNC_EMULATOR_PUT_PIECE: bytes at which a put is cut, for tests.
  std::size_t put_piece = std::size_t{1} << 30;
};

Switches switches();

}  // namespace weightsync::emulator::nccl
