#include "emulator/nccl/diagnosis.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

namespace weightsync::emulator::nccl::diagnosis {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr double kDefaultSeconds = 60;
constexpr milliseconds kTick{250};
// Blocked longer than this, a rank tells its peers.
constexpr milliseconds kPublishAfter{100};

std::string seconds(Clock::duration duration) {
  const auto tenths = std::chrono::duration_cast<milliseconds>(duration).count() / 100;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

void write_all(const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t written = ::write(STDERR_FILENO, text.data() + at, text.size() - at);
    if (written < 0 && errno != EINTR) return;
    at += static_cast<std::size_t>(std::max<ssize_t>(written, 0));
  }
}

void tell(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) {
    text += "weightsync emulator (process " + std::to_string(::getpid()) +
            "): " + line + "\n";
  }
  write_all(text);
}

}  // namespace

// One for each process; never destroyed, since its thread runs until the process ends.
class Watcher {
 public:
  // A forked child gets its own: it has neither its parent's thread nor its guards.
  static Watcher& here() {
    static std::atomic<Watcher*> current{nullptr};
    Watcher* found = current.load();
    while (found == nullptr || found->pid_ != ::getpid()) {
      auto* const fresh = new Watcher;
      if (current.compare_exchange_strong(found, fresh)) return *fresh;
      delete fresh;
    }
    return *found;
  }

  void add(Guard& guard) {
    const std::lock_guard<std::mutex> lock(mutex_);
    guard.since_ = Clock::now();
    guard.place_ = guards_.insert(guards_.end(), &guard);
    if (!started_) std::thread([this] { run(); }).detach();
    started_ = true;
    if (idle_) added_.notify_one();
  }

  void remove(Guard& guard) {
    const std::lock_guard<std::mutex> lock(mutex_);
    guards_.erase(guard.place_);
    unpublish(guard);
  }

  void renew(Guard& guard) {
    const std::lock_guard<std::mutex> lock(mutex_);
    guard.since_ = Clock::now();
    unpublish(guard);
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      idle_ = guards_.empty();
      added_.wait(lock, [&] { return !guards_.empty(); });
      idle_ = false;
      const milliseconds tick =
          limit_.count() > 0 ? std::min(kTick, limit_ / 4 + milliseconds(1)) : kTick;
      added_.wait_for(lock, tick, [] { return false; });
      look();
    }
  }

  void look() {
    const Clock::time_point now = Clock::now();
    for (Guard* const guard : guards_) {
      if (now - guard->since_ >= kPublishAfter) publish(*guard);
    }
    for (Guard* const guard : guards_) {
      if (limit_.count() > 0 && now - guard->since_ >= limit_) find(*guard, now);
    }
  }

  static void publish(Guard& guard) {
    if (guard.published_ || !guard.blocked_.publish) return;
    guard.blocked_.publish(guard.blocked_.what());
    guard.published_ = true;
  }

  // Another guard of the same rank may have something to tell yet: it does so at the
  // next look.
  void unpublish(Guard& guard) {
    if (!std::exchange(guard.published_, false)) return;
    guard.blocked_.publish("");
    for (Guard* const other : guards_) other->published_ = false;
  }

  static std::string line(const Guard& guard, Clock::time_point now) {
    const Blocked& blocked = guard.blocked_;
    return blocked.who() + " is blocked since " + seconds(now - guard.since_) + " in " +
           blocked.what();
  }

  void find(Guard& first, Clock::time_point now) const {
    if (!first.blocked_.apart || !first.blocked_.apart()) report(first, now);
    if (std::exchange(first.told_, true)) return;
    tell({"set apart: " + line(first, now) +
          ". It was aborted, which ends nothing here nor on hardware"});
  }

  [[noreturn]] void report(const Guard& first, Clock::time_point now) const {
    std::vector<std::string> lines{
        "nothing moves since " + seconds(now - first.since_) +
            ". On hardware this hangs in silence; here the process ends with code " +
            std::to_string(kHangExitCode) +
            ". (WEIGHTSYNC_EMULATOR_HANG_SECONDS sets the limit.)",
        line(first, now)};
    for (const std::string& each : first.blocked_.context())
      lines.push_back("  " + each);
    for (const Guard* const other : guards_) {
      if (other != &first) lines.push_back("also: " + line(*other, now));
    }
    end_process(lines);
  }

  // Constant after construction.
  const pid_t pid_ = ::getpid();
  const milliseconds limit_ = limit_of_environment();

  std::mutex mutex_;
  std::condition_variable added_;
  // Guarded by mutex_.
  std::list<Guard*> guards_;
  bool started_ = false;
  bool idle_ = false;
};

Guard::Guard(Blocked blocked)
    : watcher_(Watcher::here()), blocked_(std::move(blocked)) {
  watcher_.add(*this);
}

Guard::~Guard() { watcher_.remove(*this); }

void Guard::progress() { watcher_.renew(*this); }

milliseconds limit_of_environment() {
  const char* const value = std::getenv("WEIGHTSYNC_EMULATOR_HANG_SECONDS");
  double limit = kDefaultSeconds;
  if (value != nullptr && *value != '\0') {
    char* end = nullptr;
    const double parsed = std::strtod(value, &end);
    if (*end == '\0' && parsed >= 0 && parsed < 1e9) limit = parsed;
  }
  return milliseconds(static_cast<std::int64_t>(limit * 1000));
}

void end_process(const std::vector<std::string>& lines) {
  tell(lines);
  ::_exit(kHangExitCode);
}

}  // namespace weightsync::emulator::nccl::diagnosis
