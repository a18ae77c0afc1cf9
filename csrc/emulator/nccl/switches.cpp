#include "emulator/nccl/switches.h"

#include "emulator/nccl/environment.h"

namespace weightsync::emulator::nccl {

Switches switches() {
  const auto is_on = [](const char* name, bool otherwise) {
    return environment_number(name).value_or(otherwise ? 1 : 0) != 0;
  };
  Switches read;
  read.cumem = is_on("NCCL_CUMEM_ENABLE", read.cumem);
  read.windows = is_on("NCCL_WIN_ENABLE", read.windows);
  read.elastic = is_on("NCCL_ELASTIC_BUFFER_REGISTER", read.elastic);
  read.stride = environment_number("NCCL_WIN_STRIDE").value_or(read.stride);
  read.strict = is_on("WEIGHTSYNC_EMULATOR_STRICT", read.strict);
  const long long piece =
      environment_number("WEIGHTSYNC_EMULATOR_PUT_PIECE").value_or(0);
  if (piece > 0) read.put_piece = static_cast<std::size_t>(piece);
  return read;
}

}  // namespace weightsync::emulator::nccl
