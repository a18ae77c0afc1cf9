#include "emulator/faults.h"

#include <signal.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

namespace weightsync::emulator {
namespace {

// How soon a stalled operation notices that it was given up.
constexpr std::chrono::milliseconds kGlance{5};

// The finalizer of splitmix64: close inputs give unrelated outputs.
std::uint64_t mixed(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// From 0 to below 1; the same for the same numbers, whenever and wherever it is asked.
double chance(std::uint64_t seed, std::size_t rule, int rank, std::uint64_t count) {
  std::uint64_t value = mixed(seed + rule);
  value = mixed(value + static_cast<std::uint64_t>(rank));
  value = mixed(value + count);
  return static_cast<double>(value >> 11) * 0x1p-53;
}

bool matches(const FaultRule& rule, std::size_t index, int rank, std::uint64_t count) {
  if (rule.rank && *rule.rank != rank) return false;
  if (count < rule.first || count > rule.last) return false;
  return rule.probability >= 1.0 ||
         chance(rule.seed, index, rank, count) < rule.probability;
}

void tell(const Action& action, const char* what) {
  std::fprintf(stderr, "weightsync emulator: process %d %s, as the fault '%s' asks\n",
               static_cast<int>(::getpid()), what, action.entry.c_str());
}

// What becomes of it; what is traced is told.
Action decided(const FaultRule& rule, std::string_view name, std::uint64_t count) {
  if (rule.action.kind != Action::Kind::kTrace) return rule.action;
  std::fprintf(stderr, "weightsync emulator: process %d calls %s, occurrence %llu\n",
               static_cast<int>(::getpid()), std::string(name).c_str(),
               static_cast<unsigned long long>(count));
  return {};
}

}  // namespace

Action Faults::next(OperationKind operation, int rank) {
  const shm::MutexLock lock(mu_);
  if (rules_.empty()) return {};
  const std::uint64_t count = ++counts_[{operation, rank}];
  const std::uint64_t any_count = ++any_counts_[rank];
  for (std::size_t index = 0; index < rules_.size(); ++index) {
    const FaultRule& rule = rules_[index];
    if (!rule.function.empty()) continue;
    if (rule.operation && *rule.operation != operation) continue;
    if (!matches(rule, index, rank, rule.operation ? count : any_count)) continue;
    return decided(rule, name_of(operation), count);
  }
  return {};
}

Action Faults::next_call(std::string_view function, int rank) {
  const shm::MutexLock lock(mu_);
  if (rules_.empty()) return {};
  const std::uint64_t count = ++call_counts_[std::string(function)];
  for (std::size_t index = 0; index < rules_.size(); ++index) {
    const FaultRule& rule = rules_[index];
    if (rule.function != function || !matches(rule, index, rank, count)) continue;
    return decided(rule, function, count);
  }
  return {};
}

void Faults::inject(std::vector<FaultRule> rules) {
  const shm::MutexLock lock(mu_);
  rules_ = std::move(rules);
  counts_.clear();
  any_counts_.clear();
  call_counts_.clear();
}

shm::Result<FaultSpec> faults_of_environment() {
  const char* value = std::getenv("WEIGHTSYNC_EMULATOR_FAULTS");
  if (value == nullptr) return FaultSpec{};
  auto spec = read_faults(value);
  if (spec.ok()) return spec;
  return shm::Status{shm::Code::kInvalid,
                     "WEIGHTSYNC_EMULATOR_FAULTS: " + spec.status().message()};
}

std::optional<int> rank_of_environment() {
  const char* value = std::getenv("RANK");
  if (value == nullptr) return std::nullopt;
  int rank = -1;
  const char* end = value + std::strlen(value);
  const auto [stop, error] = std::from_chars(value, end, rank);
  if (error != std::errc() || stop != end || rank < 0) return std::nullopt;
  return rank;
}

int failed(const Action& action) {
  if (action.kind != Action::Kind::kFail) return 0;
  tell(action, ("fails a call with code " + std::to_string(action.code)).c_str());
  return action.code;
}

bool is_null(const Action& action) {
  if (action.kind != Action::Kind::kNull) return false;
  tell(action, "gives no window");
  return true;
}

bool carry_out(const Action& action, const std::function<bool()>& given_up) {
  switch (action.kind) {
    case Action::Kind::kNone:
    case Action::Kind::kFail:
    case Action::Kind::kNull:
    case Action::Kind::kTrace:
      return true;
    case Action::Kind::kDelay:
      std::this_thread::sleep_for(action.delay);
      return true;
    case Action::Kind::kKill:
      tell(action, "kills itself");
      ::kill(::getpid(), SIGKILL);
      break;  // not reached
    case Action::Kind::kStall:
      tell(action, "stalls an operation");
      break;
    case Action::Kind::kBlock:
      tell(action, "blocks a call");
      break;
    case Action::Kind::kError:
      tell(action, ("fails with code " + std::to_string(action.code)).c_str());
      break;
  }
  while (!given_up || !given_up()) std::this_thread::sleep_for(kGlance);
  return false;
}

int code_of_call(Faults& faults, const char* function) {
  const Action fault = faults.next_call(function, faults.process_rank());
  if (const int code = failed(fault); code != 0) return code;
  (void)carry_out(fault);
  return 0;
}

bool allows(Faults& faults, std::size_t used, std::size_t nbytes) {
  const Action fault = faults.next(OperationKind::kMalloc, faults.process_rank());
  if (failed(fault) != 0 || !carry_out(fault)) return false;
  const std::uint64_t limit = faults.spec().memory.value_or(UINT64_MAX);
  return used <= limit && nbytes <= limit - used;
}

}  // namespace weightsync::emulator
