// Config: what an ncclConfig_t asks for, parsed by its size and version.
#pragma once

#include <string>

#include "emulator/nccl/outcome.h"
#include "nccl/abi.h"

namespace weightsync::emulator::nccl {

// The defaults are NCCL's.
struct Config {
  bool blocking = true;
  int cga_cluster_size = 4;
  int min_ctas = 1;
  int max_ctas = 64;
  std::string net_name;
  bool split_share = false;
  int traffic_class = 0;
  std::string comm_name;
  bool collnet_enable = false;
  int cta_policy = 0;
  bool shrink_share = false;
  int nvls_ctas = 0;
  int channels_per_net_peer = 0;
  bool nvlink_centric_sched = false;
  int graph_usage_mode = 2;
  int num_rma_ctx = 1;  // 0: no host RMA
  int max_p2p_peers = 0;
  int graph_stream_ordering = 1;
};

// What `config` sets over `base` (the defaults, or the parent's for a child); null sets
// nothing. Reads no byte beyond config->size and no field newer than config->version.
// Then the environment: NCCL_COMM_BLOCKING, NCCL_NUM_RMA_CTX and the share variables.
// Fails with 4.
Outcome parse_config(const ncclConfig_t* config, const Config& base, Config& parsed);

// NCCL's version that is emulated: 23007, or what WEIGHTSYNC_EMULATOR_NCCL says.
int emulated_version();

}  // namespace weightsync::emulator::nccl
