// How a closed group is carried out: host steps, then operations, then teardown.
#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "emulator/nccl/device_scope.h"
#include "emulator/nccl/group_state.h"
#include "shm/owned_thread.h"

namespace weightsync::emulator::nccl {
namespace {

using Task = std::function<Outcome(Work&)>;

Outcome on_device(Work& work, const Task& task) {
  const DeviceScope scope(work.communicator->device());
  return task(work);
}

// Does the task for these, each on a thread of its own if there are several: one may
// wait for another one. The failure of the first that failed.
Outcome for_each(const std::vector<Work*>& several, const Task& task) {
  if (several.size() == 1) return on_device(*several.front(), task);
  std::vector<Outcome> outcomes(several.size());
  {
    std::vector<shm::OwnedThread> threads(several.size());
    for (std::size_t i = 0; i < several.size(); ++i) {
      auto run = [&, i, call = current_call()] {
        const CallScope scope(call);
        outcomes[i] = on_device(*several[i], task);
      };
      const shm::Status started = threads[i].start(run);
      if (!started.ok()) outcomes[i] = {ncclSystemError, started.message()};
    }
  }
  const auto failed = std::find_if(outcomes.begin(), outcomes.end(),
                                   [](const Outcome& each) { return !each.ok(); });
  return failed == outcomes.end() ? Outcome() : *failed;
}

bool has_step(const Work& work, Step step) {
  return std::any_of(work.steps.begin(), work.steps.end(),
                     [step](const HostStep& each) { return each.step == step; });
}

Outcome run_steps(Batch& batch, Step step) {
  std::vector<Work*> concerned;
  for (Work& work : batch) {
    if (has_step(work, step)) concerned.push_back(&work);
  }
  return for_each(concerned, [step](Work& work) -> Outcome {
    for (const HostStep& each : work.steps) {
      if (each.step != step) continue;
      if (Outcome outcome = each.run(); !outcome.ok()) return outcome;
    }
    return {};
  });
}

// By phase, and neighbours that go together fused.
void arrange(std::vector<std::shared_ptr<Operation>>& operations) {
  std::stable_sort(
      operations.begin(), operations.end(),
      [](const auto& a, const auto& b) { return a->phase() < b->phase(); });
  std::vector<std::shared_ptr<Operation>> fused;
  for (auto& operation : operations) {
    const bool follows = !fused.empty() && fused.back()->phase() == operation->phase();
    if (follows && fused.back()->absorb(*operation)) continue;
    fused.push_back(std::move(operation));
  }
  operations = std::move(fused);
}

Outcome prepare(Batch& batch) {
  std::vector<Work*> concerned;
  for (Work& work : batch) {
    arrange(work.operations);
    if (!work.operations.empty()) concerned.push_back(&work);
  }
  return for_each(concerned, [](Work& work) -> Outcome {
    for (const auto& operation : work.operations) {
      if (Outcome outcome = operation->prepare(*work.communicator); !outcome.ok()) {
        return outcome;
      }
    }
    return {};
  });
}

Outcome launch(Work& work) {
  if (work.operations.empty()) return {};
  Outcome outcome;
  std::vector<std::shared_ptr<Operation>> launched;
  for (const auto& operation : work.operations) {
    outcome = operation->launch(*work.communicator);
    if (!outcome.ok()) break;
    launched.push_back(operation);
  }
  std::vector<std::shared_ptr<Stream>> joined = work.streams;
  const std::shared_ptr<Stream> stream = std::move(joined.back());
  joined.pop_back();
  if (!launched.empty()) work.communicator->enqueue(launched, stream, joined);
  return outcome;
}

Outcome carry_out(Batch& batch) {
  for (const Step step : {Step::kCreate, Step::kRegister}) {
    if (Outcome done = run_steps(batch, step); !done.ok()) return done;
  }
  if (Outcome prepared = prepare(batch); !prepared.ok()) return prepared;
  for (Work& work : batch) {
    if (Outcome launched = launch(work); !launched.ok()) return launched;
  }
  return run_steps(batch, Step::kTeardown);
}

}  // namespace

Outcome execute(Batch& batch) {
  Outcome outcome = carry_out(batch);
  if (!outcome.ok()) drop(batch);
  return outcome;
}

void drop(Batch& batch) {
  for (auto work = batch.rbegin(); work != batch.rend(); ++work) {
    for (auto step = work->steps.rbegin(); step != work->steps.rend(); ++step) {
      if (step->undo) step->undo();
    }
  }
}

}  // namespace weightsync::emulator::nccl
