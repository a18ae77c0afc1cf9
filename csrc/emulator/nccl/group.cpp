#include "emulator/nccl/group.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "emulator/core.h"
#include "emulator/nccl/background.h"
#include "emulator/nccl/device_scope.h"
#include "emulator/nccl/group_state.h"

namespace weightsync::emulator::nccl {
namespace {

struct Group {
  int depth = 0;
  Outcome failure;
  Batch batch;
};

thread_local Group group_of_thread;

Outcome mixed() {
  return invalid_argument(
      "a group holds blocking and nonblocking communicators; it must be one kind");
}

// The communicator's part of the open group.
Work* work_of(const std::shared_ptr<Communicator>& communicator) {
  Batch& batch = group_of_thread.batch;
  for (Work& work : batch) {
    if (work.communicator == communicator) return &work;
  }
  const bool blocking = communicator->config().blocking;
  if (!batch.empty() && batch.front().communicator->config().blocking != blocking) {
    return nullptr;
  }
  batch.push_back({communicator, {}, {}, {}});
  return &batch.back();
}

bool is_blocking(const Batch& batch) {
  if (batch.front().communicator->config().blocking) return true;
  const auto forces = [](const HostStep& step) { return step.always_blocking; };
  return std::any_of(batch.begin(), batch.end(), [&](const Work& work) {
    return std::any_of(work.steps.begin(), work.steps.end(), forces);
  });
}

void execute_behind(Batch batch) {
  const auto job = std::make_shared<Background>();
  for (const Work& work : batch) work.communicator->begin_work(job);
  const auto shared = std::make_shared<Batch>(std::move(batch));
  job->start([shared, call = current_call()] {
    const CallScope scope(call);
    const Outcome outcome = execute(*shared);
    if (!outcome.ok()) warn(outcome);
    for (const Work& work : *shared) work.communicator->end_work(outcome);
  });
}

// The open group, which is over.
Group close_group() { return std::exchange(group_of_thread, Group{}); }

Outcome not_in_group() {
  return invalid_usage("there is no group: ncclGroupStart was not called");
}

std::shared_ptr<Stream> find_stream(const Communicator& communicator,
                                    cudaStream_t handle) {
  // The default stream is the one of the communicator's device.
  const DeviceScope scope(communicator.device());
  std::shared_ptr<Stream> stream = stream_of(handle);
  return stream && stream->device() == communicator.device() ? stream : nullptr;
}

}  // namespace

Outcome add_step(const std::shared_ptr<Communicator>& communicator, HostStep step) {
  Work* const work = work_of(communicator);
  if (work == nullptr) {
    if (step.undo) step.undo();
    return mixed();
  }
  work->steps.push_back(std::move(step));
  return {};
}

Outcome add_operation(const std::shared_ptr<Communicator>& communicator,
                      std::shared_ptr<Operation> operation, cudaStream_t stream) {
  std::shared_ptr<Stream> found = find_stream(*communicator, stream);
  if (!found) {
    return {ncclUnhandledCudaError,
            "the stream is none of device " + std::to_string(communicator->device())};
  }
  Work* const work = work_of(communicator);
  if (work == nullptr) return mixed();
  operation->set_call(current_call());
  work->operations.push_back(std::move(operation));
  auto& streams = work->streams;
  if (std::find(streams.begin(), streams.end(), found) == streams.end()) {
    streams.push_back(std::move(found));
  }
  return {};
}

Outcome group_start() {
  ++group_of_thread.depth;
  return {};
}

Outcome group_end() {
  if (group_of_thread.depth == 0) return not_in_group();
  if (--group_of_thread.depth > 0) return {};
  Group group = close_group();
  if (!group.failure.ok()) {
    drop(group.batch);
    return group.failure;
  }
  if (group.batch.empty()) return {};
  if (is_blocking(group.batch)) return execute(group.batch);
  execute_behind(std::move(group.batch));
  return {ncclInProgress, "the group goes on in the background"};
}

Outcome group_simulate_end(ncclSimInfo_t* info) {
  if (info == nullptr) return group_end();
  if (group_of_thread.depth == 0) return not_in_group();
  if (--group_of_thread.depth > 0) return {};
  Group group = close_group();
  drop(group.batch);
  if (!group.failure.ok()) return group.failure;
  if (info->magic != kNcclSimInfoMagic) {
    return invalid_argument(
        "the info was not initialised with NCCL_SIM_INFO_INITIALIZER");
  }
  // The emulator has no idea of time: what is there takes none.
  info->estimatedTime = 0.0F;
  return {};
}

void record_failure(const Outcome& outcome) {
  Group& group = group_of_thread;
  if (group.depth > 0 && group.failure.ok()) group.failure = outcome;
}

}  // namespace weightsync::emulator::nccl
