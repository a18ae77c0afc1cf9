#include "emulator/fault_spec.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>

namespace weightsync::emulator {
namespace {

using shm::Code;
using shm::Result;
using shm::Status;

enum class Library { kNccl, kCuda };

struct Known {
  OperationKind operation;
  std::string_view name;
  Library library;
};

constexpr Known kOperations[] = {
#define WEIGHTSYNC_EACH(enumerator, name, library) \
  {OperationKind::enumerator, name, Library::library},
    WEIGHTSYNC_EMULATOR_OPERATIONS(WEIGHTSYNC_EACH)
#undef WEIGHTSYNC_EACH
};

Library library_of(OperationKind operation) {
  return kOperations[static_cast<std::size_t>(operation)].library;
}

constexpr std::string_view kBlanks = " \t\r\n";
constexpr std::string_view kVersions[] = {"2.29.7", "2.30.7", "2.31.2", "2.32.3"};
// Results of NCCL from ncclUnhandledCudaError to ncclTimeout.
constexpr int kLastNcclCode = 8;
// cudaErrorMemoryAllocation, all that an allocation can fail with.
constexpr int kMemoryCode = 2;
// cudaErrorUnknown, the highest that CUDA has.
constexpr int kLastCudaCode = 999;
constexpr double kLongestDelay = 1e6;

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

std::vector<std::string_view> parts(std::string_view text, char separator) {
  std::vector<std::string_view> found;
  while (true) {
    const std::size_t end = text.find(separator);
    found.push_back(trimmed(text.substr(0, end)));
    if (end == std::string_view::npos) return found;
    text.remove_prefix(end + 1);
  }
}

// What stands before and after the first `separator`; without one there is no second.
std::pair<std::string_view, std::optional<std::string_view>> divided(
    std::string_view text, char separator) {
  const std::size_t at = text.find(separator);
  if (at == std::string_view::npos) return {trimmed(text), std::nullopt};
  return {trimmed(text.substr(0, at)), trimmed(text.substr(at + 1))};
}

// A number that is the whole text.
template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const char* const begin = text.data();  // NOLINT: from_chars gets its end
  const char* const end = begin + text.size();
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (error != std::errc() || stop != end || text.empty()) return std::nullopt;
  return value;
}

std::string quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

Status wrong(const std::string& what, std::string_view found,
             const std::string& wanted) {
  return {Code::kInvalid, what + " is " + quoted(found) + ", but must be " + wanted};
}

std::string names_of_operations() {
  std::string names;
  for (const Known& each : kOperations) names += std::string(each.name) + ", ";
  return names + "or *";
}

// Whether this looks like the name of a function of CUDA or NCCL.
bool is_function(std::string_view text) {
  for (std::string_view prefix : {"nccl", "cuda", "cu"}) {
    const std::string_view rest = text.substr(std::min(prefix.size(), text.size()));
    if (text.substr(0, prefix.size()) == prefix && !rest.empty() &&
        rest.front() >= 'A' && rest.front() <= 'Z') {
      return true;
    }
  }
  return false;
}

Status read_operation(std::string_view text, FaultRule& rule) {
  if (text == "*" || text == "any") return {};
  if (is_function(text)) {
    rule.function = std::string(text);
    return {};
  }
  for (const Known& each : kOperations) {
    if (text != each.name) continue;
    rule.operation = each.operation;
    return {};
  }
  return wrong("the operation", text, "one of " + names_of_operations());
}

Status read_rank(std::string_view text, FaultRule& rule) {
  if (text == "*") return {};
  const auto rank = number<int>(text);
  if (!rank || *rank < 0) return wrong("rank", text, "a number of at least 0, or *");
  rule.rank = rank;
  return {};
}

Status read_occurrence(std::string_view name, std::string_view text, FaultRule& rule) {
  const auto count = number<std::uint64_t>(text);
  if (!count || *count < 1) {
    return wrong(std::string(name), text, "a number of at least 1");
  }
  rule.first = *count;
  if (name == "n") rule.last = *count;
  return {};
}

Status read_probability(std::string_view text, FaultRule& rule) {
  const auto probability = number<double>(text);
  if (!probability || !(*probability >= 0.0 && *probability <= 1.0)) {
    return wrong("p", text, "a probability from 0 to 1");
  }
  rule.probability = *probability;
  return {};
}

Status read_seed(std::string_view text, FaultRule& rule) {
  const auto seed = number<std::uint64_t>(text);
  if (!seed) return wrong("seed", text, "a number of at least 0");
  rule.seed = *seed;
  return {};
}

Status read_matcher(std::string_view text, FaultRule& rule) {
  const auto [name, value] = divided(text, '=');
  if (!value) return wrong("a matcher", text, "name=value");
  if (name == "rank") return read_rank(*value, rule);
  if (name == "n" || name == "from") return read_occurrence(name, *value, rule);
  if (name == "p") return read_probability(*value, rule);
  if (name == "seed") return read_seed(*value, rule);
  return wrong("the name of a matcher", name, "one of rank, n, from, p, seed");
}

Status read_matchers(std::string_view text, FaultRule& rule) {
  std::vector<std::string_view> names;
  for (std::string_view each : parts(text, ',')) {
    if (Status status = read_matcher(each, rule); !status.ok()) return status;
    const std::string_view name = divided(each, '=').first;
    if (std::count(names.begin(), names.end(), name) > 0) {
      return {Code::kInvalid, std::string(name) + " is given twice"};
    }
    names.push_back(name);
  }
  const auto given = [&](const char* name) {
    return std::count(names.begin(), names.end(), name) > 0;
  };
  if (given("n") && given("from"))
    return {Code::kInvalid, "n and from exclude each other"};
  if (given("seed") && !given("p")) return {Code::kInvalid, "seed needs p"};
  return {};
}

Status read_delay(std::string_view text, Action& action) {
  const auto seconds = number<double>(text);
  if (!seconds || !(*seconds >= 0.0 && *seconds <= kLongestDelay)) {
    return wrong("delay", text, "a number of seconds from 0 to 1000000");
  }
  action.kind = Action::Kind::kDelay;
  action.delay = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(*seconds));
  return {};
}

bool is_of_nccl(const FaultRule& rule) {
  return rule.function.empty() || rule.function.front() == 'n';
}

Status read_code(std::string_view text, const FaultRule& rule, Action& action) {
  if (!rule.operation && rule.function.empty()) {
    return {Code::kInvalid,
            "fail needs one operation: the codes of CUDA and of NCCL differ"};
  }
  const auto code = number<int>(text);
  if (rule.operation && library_of(*rule.operation) == Library::kCuda &&
      code != kMemoryCode) {
    return wrong("fail", text, "2, cudaErrorMemoryAllocation");
  }
  const bool nccl = is_of_nccl(rule);
  if (!code || *code < 1 || *code > (nccl ? kLastNcclCode : kLastCudaCode)) {
    return wrong("fail", text,
                 nccl ? "an ncclResult_t from 1 to 8" : "a cudaError from 1 to 999");
  }
  action.kind = Action::Kind::kFail;
  action.code = *code;
  return {};
}

// One-sided operations are carried out by others, and what is not one at all has
// neither a stream nor a communicator to fail.
Status needs_a_transfer(const char* action, const FaultRule& rule) {
  if (rule.operation && *rule.operation >= OperationKind::kAllReduce &&
      *rule.operation <= OperationKind::kRecv) {
    return {};
  }
  return {Code::kInvalid,
          std::string(action) + " needs one operation: a collective, send or recv"};
}

Status read_error(std::string_view text, const FaultRule& rule, Action& action) {
  if (Status status = needs_a_transfer("error", rule); !status.ok()) return status;
  const auto code = number<int>(text);
  if (!code || *code < 1 || *code > kLastNcclCode) {
    return wrong("error", text, "an ncclResult_t from 1 to 8");
  }
  action.kind = Action::Kind::kError;
  action.code = *code;
  return {};
}

Status read_null(const FaultRule& rule, Action& action) {
  action.kind = Action::Kind::kNull;
  if (rule.operation == OperationKind::kWindowRegister) return {};
  return {Code::kInvalid, "null needs the operation window_register"};
}

Status read_action(std::string_view text, FaultRule& rule) {
  const auto [name, value] = divided(text, '=');
  if (value && name == "delay") return read_delay(*value, rule.action);
  if (value && name == "fail") return read_code(*value, rule, rule.action);
  if (value && name == "error") return read_error(*value, rule, rule.action);
  if (!value && name == "kill") {
    rule.action.kind = Action::Kind::kKill;
    return {};
  }
  if (!value && name == "stall") {
    rule.action.kind = Action::Kind::kStall;
    if (rule.function.empty()) return {};
    return {Code::kInvalid, "stall needs an operation: a function returns"};
  }
  if (!value && name == "null") return read_null(rule, rule.action);
  if (!value && name == "trace") {
    rule.action.kind = Action::Kind::kTrace;
    return {};
  }
  if (!value && name == "block") {
    rule.action.kind = Action::Kind::kBlock;
    return needs_a_transfer("block", rule);
  }
  return wrong(
      "the action", text,
      "delay=SECONDS, stall, block, kill, null, trace, fail=CODE or error=CODE");
}

Status read_rule(std::string_view entry, std::string_view matching,
                 std::string_view action, FaultSpec& spec) {
  FaultRule rule;
  rule.action.entry = std::string(entry);
  const auto [operation, matchers] = divided(matching, '@');
  Status status = read_operation(operation, rule);
  if (status.ok() && matchers) status = read_matchers(*matchers, rule);
  if (status.ok()) status = read_action(action, rule);
  if (status.ok()) spec.rules.push_back(std::move(rule));
  return status;
}

Status read_memory(std::string_view text, FaultSpec& spec) {
  const std::size_t digits =
      std::min(text.find_first_not_of("0123456789"), text.size());
  const auto count = number<std::uint64_t>(text.substr(0, digits));
  const std::string_view unit = trimmed(text.substr(digits));
  constexpr std::string_view kUnits[] = {"", "KiB", "MiB", "GiB", "TiB"};
  const auto* found = std::find(std::begin(kUnits), std::end(kUnits), unit);
  const std::ptrdiff_t shift = 10 * (found - std::begin(kUnits));
  if (!count || found == std::end(kUnits) || *count > UINT64_MAX >> shift) {
    return wrong("out-of-memory", text, "a number of bytes, such as 4096 or 2GiB");
  }
  spec.memory = *count << shift;
  return {};
}

Status read_networks(std::string_view text, FaultSpec& spec) {
  for (std::string_view each : parts(text, ',')) {
    if (each == "*") {
      spec.network_everywhere = true;
      continue;
    }
    const auto [left, right] = divided(each, '-');
    const auto first = number<int>(left);
    const auto second = number<int>(right.value_or(""));
    if (!first || !second || *first < 0 || *second < 0 || *first == *second) {
      return wrong("a pair of network", each, "two different ranks, such as 0-2, or *");
    }
    spec.networks.push_back(std::minmax(*first, *second));
  }
  return {};
}

Status read_nccl(std::string_view text, FaultSpec& spec) {
  if (std::find(std::begin(kVersions), std::end(kVersions), text) ==
      std::end(kVersions)) {
    return wrong("nccl", text, "2.29.7, 2.30.7, 2.31.2 or 2.32.3");
  }
  spec.nccl = std::string(text);
  return {};
}

Status read_entry(std::string_view entry, FaultSpec& spec) {
  if (const auto [matching, action] = divided(entry, ':'); action) {
    return read_rule(entry, matching, *action, spec);
  }
  const auto [name, value] = divided(entry, '=');
  if (!value && name == "no-symmetric") {
    spec.symmetric = false;
    return {};
  }
  if (!value && name == "set-apart") {
    spec.set_apart = true;
    return {};
  }
  if (value && name == "out-of-memory") return read_memory(*value, spec);
  if (value && name == "network") return read_networks(*value, spec);
  if (value && name == "nccl") return read_nccl(*value, spec);
  return {Code::kInvalid,
          "it is neither OPERATION@MATCHERS:ACTION nor one of no-symmetric, "
          "set-apart, out-of-memory=BYTES, network=PAIRS, nccl=VERSION"};
}

}  // namespace

std::string_view name_of(OperationKind operation) {
  return kOperations[static_cast<std::size_t>(operation)].name;
}

bool FaultSpec::network_between(int rank, int peer) const {
  if (rank == peer) return false;
  const std::pair<int, int> pair = std::minmax(rank, peer);
  return network_everywhere ||
         std::find(networks.begin(), networks.end(), pair) != networks.end();
}

Result<FaultSpec> parse_faults(std::string_view text) {
  FaultSpec spec;
  for (std::string_view line : parts(text, '\n')) {
    for (std::string_view entry : parts(line.substr(0, line.find('#')), ';')) {
      if (entry.empty()) continue;
      const Status status = read_entry(entry, spec);
      if (status.ok()) continue;
      return Status{Code::kInvalid,
                    "the fault " + quoted(entry) + ": " + status.message()};
    }
  }
  return spec;
}

Result<FaultSpec> read_faults(const std::string& value) {
  if (value.empty() || value.front() != '@') return parse_faults(value);
  const std::string path = value.substr(1);
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) {
    return Status{Code::kInvalid,
                  "the file of faults " + quoted(path) + " cannot be read"};
  }
  return parse_faults(text.str());
}

}  // namespace weightsync::emulator
