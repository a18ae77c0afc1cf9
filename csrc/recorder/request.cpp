#include "recorder/request.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

namespace weightsync::recorder {
namespace {

// What a handler of signals can reach, which is nothing but globals.
std::atomic<int> bell{-1};
std::atomic<pid_t> home{0};
struct sigaction before;  // constant once the handler is installed

void call_before(int number, siginfo_t* info, void* context) {
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  }
}

void on_signal(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  if (::getpid() == home.load()) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t rung = ::write(bell.load(), &one, sizeof one);
  }
  call_before(number, info, context);
  errno = saved;
}

void answer(int descriptor, const std::function<void()>& dump) {
  for (;;) {
    std::uint64_t count = 0;
    const ssize_t got = ::read(descriptor, &count, sizeof count);
    if (got == sizeof count) {
      dump();
    } else if (errno != EINTR) {
      return;
    }
  }
}

}  // namespace

int signal_number(const std::string& name) {
  const std::string bare = name.rfind("SIG", 0) == 0 ? name.substr(3) : name;
  for (int number = 1; number < NSIG; ++number) {
    if (number == SIGKILL || number == SIGSTOP) continue;
    const char* const known = ::sigabbrev_np(number);
    if (known != nullptr && bare == known) return number;
    if (bare == std::to_string(number)) return number;
  }
  return 0;
}

shm::Status dump_on_signal(int number, std::function<void()> dump) {
  const int descriptor = ::eventfd(0, EFD_CLOEXEC);
  if (descriptor < 0) return shm::system_error("make an eventfd", errno);
  int none = -1;
  if (!bell.compare_exchange_strong(none, descriptor)) {
    ::close(descriptor);
    return {shm::Code::kInvalid, "dumps are asked for by a signal already"};
  }
  home.store(::getpid());
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigemptyset(&action.sa_mask);
  if (::sigaction(number, nullptr, &before) != 0 ||
      ::sigaction(number, &action, nullptr) != 0) {
    return shm::system_error("handle signal " + std::to_string(number), errno);
  }
  std::thread([descriptor, dump = std::move(dump)] {
    answer(descriptor, dump);
  }).detach();
  return {};
}

}  // namespace weightsync::recorder
