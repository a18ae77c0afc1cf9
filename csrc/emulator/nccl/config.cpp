#include "emulator/nccl/config.h"

#include <algorithm>
#include <charconv>
#include <climits>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "emulator/nccl/environment.h"
#include "emulator/nccl/process_faults.h"

namespace weightsync::emulator::nccl {
namespace {

// Fields by their place, with the version of the caller's header that brought them.
constexpr struct {
  std::size_t offset;
  unsigned int version;
} kNewerFields[] = {
    {offsetof(ncclConfig_t, trafficClass), 22600},
    {offsetof(ncclConfig_t, commName), 22700},
    {offsetof(ncclConfig_t, collnetEnable), 22700},
    {offsetof(ncclConfig_t, CTAPolicy), 22700},
    {offsetof(ncclConfig_t, shrinkShare), 22700},
    {offsetof(ncclConfig_t, nvlsCTAs), 22700},
    {offsetof(ncclConfig_t, nChannelsPerNetPeer), 22800},
    {offsetof(ncclConfig_t, nvlinkCentricSched), 22800},
    {offsetof(ncclConfig_t, graphUsageMode), 22900},
    {offsetof(ncclConfig_t, numRmaCtx), 22900},
    {offsetof(ncclConfig_t, maxP2pPeers), 23000},
    {offsetof(ncclConfig_t, graphStreamOrdering), 23000},
};

ncclConfig_t undefined_config() {
  const int undefined = kNcclUndefInt;
  return {sizeof(ncclConfig_t),
          kNcclApiMagic,
          kNcclVersion,
          undefined,
          undefined,
          undefined,
          undefined,
          nullptr,
          undefined,
          undefined,
          nullptr,
          undefined,
          undefined,
          undefined,
          undefined,
          undefined,
          undefined,
          undefined,
          undefined,
          undefined,
          undefined};
}

// The caller's bytes as far as they go, "undefined" behind.
ncclConfig_t read(const ncclConfig_t& given) {
  ncclConfig_t whole = undefined_config();
  const ncclConfig_t nothing = whole;
  std::memcpy(&whole, &given, std::min(given.size, sizeof whole));
  for (const auto& field : kNewerFields) {
    if (given.version >= field.version) continue;
    // The fields are ints and pointers, in this order of growth: all behind are newer.
    std::memcpy(reinterpret_cast<char*>(&whole) + field.offset,
                reinterpret_cast<const char*>(&nothing) + field.offset,
                sizeof whole - field.offset);
    break;
  }
  return whole;
}

// Collects the first refusal.
class Parser {
 public:
  void number(const char* name, int value, int least, int most, int& target) {
    if (value == kNcclUndefInt) return;
    if (value < least || value > most) {
      refuse(name, value);
    } else {
      target = value;
    }
  }
  void flag(const char* name, int value, bool& target) {
    int number_there = target ? 1 : 0;
    number(name, value, 0, 1, number_there);
    target = number_there != 0;
  }
  static void text(const char* value, std::string& target) {
    if (value != nullptr) target = value;
  }
  void refuse(const char* name, int value) {
    if (outcome.ok()) {
      outcome = invalid_argument("ncclConfig_t." + std::string(name) + " is " +
                                 std::to_string(value));
    }
  }

  Outcome outcome;
};

void override_by_environment(Config& parsed) {
  const auto flag = [](const char* name, bool& target) {
    if (const auto value = environment_number(name)) target = *value != 0;
  };
  flag("NCCL_COMM_BLOCKING", parsed.blocking);
  flag("NCCL_COMM_SPLIT_SHARE_RESOURCES", parsed.split_share);
  flag("NCCL_COMM_SHRINK_SHARE_RESOURCES", parsed.shrink_share);
  if (const auto contexts = environment_number("NCCL_NUM_RMA_CTX")) {
    if (*contexts >= 0) parsed.num_rma_ctx = static_cast<int>(*contexts);
  }
}

Outcome apply(const ncclConfig_t& given, Config& parsed) {
  Parser parser;
  parser.flag("blocking", given.blocking, parsed.blocking);
  parser.number("cgaClusterSize", given.cgaClusterSize, 0, 8, parsed.cga_cluster_size);
  parser.number("minCTAs", given.minCTAs, 1, INT_MAX, parsed.min_ctas);
  parser.number("maxCTAs", given.maxCTAs, 1, INT_MAX, parsed.max_ctas);
  Parser::text(given.netName, parsed.net_name);
  parser.flag("splitShare", given.splitShare, parsed.split_share);
  parser.number("trafficClass", given.trafficClass, 0, INT_MAX, parsed.traffic_class);
  Parser::text(given.commName, parsed.comm_name);
  parser.flag("collnetEnable", given.collnetEnable, parsed.collnet_enable);
  parser.number("CTAPolicy", given.CTAPolicy, 0, 3, parsed.cta_policy);
  parser.flag("shrinkShare", given.shrinkShare, parsed.shrink_share);
  parser.number("nvlsCTAs", given.nvlsCTAs, 1, INT_MAX, parsed.nvls_ctas);
  parser.number("nChannelsPerNetPeer", given.nChannelsPerNetPeer, 1, INT_MAX,
                parsed.channels_per_net_peer);
  parser.flag("nvlinkCentricSched", given.nvlinkCentricSched,
              parsed.nvlink_centric_sched);
  parser.number("graphUsageMode", given.graphUsageMode, 0, 2, parsed.graph_usage_mode);
  parser.number("numRmaCtx", given.numRmaCtx, 0, INT_MAX, parsed.num_rma_ctx);
  parser.number("maxP2pPeers", given.maxP2pPeers, 1, INT_MAX, parsed.max_p2p_peers);
  parser.number("graphStreamOrdering", given.graphStreamOrdering, 0, 1,
                parsed.graph_stream_ordering);
  if (parsed.min_ctas > parsed.max_ctas) parser.refuse("minCTAs", parsed.min_ctas);
  return parser.outcome;
}

// Three numbers with a dot between them, as NCCL counts them; nothing for other text.
std::optional<int> version_of(std::string_view text) {
  int version = 0;
  for (const int weight : {10000, 100, 1}) {
    int part = 0;
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), part);
    if (error != std::errc()) return std::nullopt;
    version += weight * part;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (weight == 1) break;
    if (text.empty() || text.front() != '.') return std::nullopt;
    text.remove_prefix(1);
  }
  return version;
}

}  // namespace

Outcome parse_config(const ncclConfig_t* config, const Config& base, Config& parsed) {
  parsed = base;
  if (config != nullptr) {
    if (config->size < offsetof(ncclConfig_t, blocking) ||
        config->magic != kNcclApiMagic) {
      return invalid_argument(
          "the config was not initialised with "
          "NCCL_CONFIG_INITIALIZER: its size or magic number is wrong");
    }
    if (Outcome applied = apply(read(*config), parsed); !applied.ok()) return applied;
  }
  override_by_environment(parsed);
  return {};
}

int emulated_version() {
  static const int version = [] {
    const std::string& fault = process_faults().spec().nccl;
    const std::string asked =
        fault.empty() ? environment("WEIGHTSYNC_EMULATOR_NCCL") : fault;
    return version_of(asked).value_or(kNcclVersion);
  }();
  return version;
}

}  // namespace weightsync::emulator::nccl
