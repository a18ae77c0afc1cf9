#include "backend/nccl/bell.h"

#include <c10/core/DeviceGuard.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "backend/nccl/raising.h"
#include "backend/nccl/session.h"
#include "cuda/runtime.h"

namespace weightsync {
namespace {

using Shared = std::shared_ptr<Bell>;

// The host function: it owns what it is given. Where it never runs that is lost, which
// is a few bytes, for whoever listens closes the descriptor.
void ring_shared(void* data) {
  const std::unique_ptr<Shared> bell(static_cast<Shared*>(data));
  (*bell)->ring();
}

}  // namespace

Bell::Bell() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (descriptor_ < 0) throw StatusError(shm::system_error("create an eventfd", errno));
}

Bell::~Bell() { close(); }

void Bell::ring() {
  const std::uint64_t one = 1;
  const std::lock_guard<std::mutex> lock(mu_);
  if (open_) (void)!::write(descriptor_, &one, sizeof one);
}

void Bell::close() {
  const std::lock_guard<std::mutex> lock(mu_);
  if (open_) ::close(descriptor_);
  open_ = false;
}

void Bell::ring_after(const Shared& bell, const c10::Stream& stream) {
  const c10::DeviceGuard on(stream.device());
  auto given = std::make_unique<Shared>(bell);
  const cuda::Runtime& runtime = cuda::runtime();
  raise(runtime.check(
      runtime.launch_host_func(handle_of(stream), &ring_shared, given.get()),
      "cudaLaunchHostFunc"));
  (void)given.release();  // The host function has it now.
}

}  // namespace weightsync
