#include "event.h"

#include <chrono>
#include <utility>

namespace weightsync::emulator {
namespace {

using shm::Deadline;
using shm::Doorbell;
using shm::Populate;
using shm::Result;
using shm::Segment;

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Event::Event(int device, unsigned flags, std::shared_ptr<Segment> segment, bool ours)
    : device_(device),
      flags_(flags),
      ours_(ours),
      segment_(std::move(segment)),
      numbers_(segment_ == nullptr
                   ? std::make_shared<Numbers>()
                   : std::shared_ptr<Numbers>(
                         segment_, reinterpret_cast<Numbers*>(segment_->data()))) {}

Result<std::shared_ptr<Event>> Event::create(int device, unsigned flags) {
  std::shared_ptr<Segment> segment;
  if ((flags & cudaEventInterprocess) != 0) {
    auto made = Segment::create(sizeof(Numbers), Populate::kYes);
    if (!made.ok()) return made.status();
    segment = made.take();
  }
  return std::shared_ptr<Event>(new Event(device, flags, std::move(segment), true));
}

Result<std::shared_ptr<Event>> Event::open(int device, const shm::Locator& locator) {
  if (locator.nbytes != sizeof(Numbers)) {
    return shm::Status(shm::Code::kInvalid, "this is no handle of an event");
  }
  auto opened = Segment::open(locator, Populate::kYes);
  if (!opened.ok()) return opened.status();
  constexpr unsigned kFlags = cudaEventInterprocess | cudaEventDisableTiming;
  return std::shared_ptr<Event>(new Event(device, kFlags, opened.take(), false));
}

void Event::record(Stream& stream) {
  const std::uint64_t number = numbers_->recorded.fetch_add(1) + 1;
  stream.mark("cudaEventRecord",
              [numbers = numbers_, number] { reach(*numbers, number); });
}

void Event::reach(Numbers& numbers, std::uint64_t number) {
  Numbers::Slot& slot = numbers.slot(number);
  slot.when = now();
  std::uint64_t before = slot.reached;
  while (before < number && !slot.reached.compare_exchange_weak(before, number)) {
  }
  numbers.bell.ring();
}

void Event::wait(Numbers& numbers, std::uint64_t number) {
  const Doorbell::Waiting waiting(numbers.bell);
  for (;;) {
    const std::uint32_t seen = numbers.bell.count();
    if (numbers.has(number)) return;
    numbers.bell.wait(seen, Deadline::max());
  }
}

void Event::wait_on(Stream& stream) {
  const std::uint64_t number = numbers_->recorded;
  if (numbers_->has(number)) return;
  stream.enqueue("cudaStreamWaitEvent", [numbers = numbers_, number, ours = ours_] {
    set_operation_note(ours ? "an event" : "an event of another process", "");
    wait(*numbers, number);
  });
}

void Event::synchronize() { wait(*numbers_, numbers_->recorded); }

double Event::elapsed(const Event& start, const Event& end) {
  constexpr double kNanosecondsInMillisecond = 1e6;
  const auto when = [](Numbers& numbers) {
    return numbers.slot(numbers.recorded).when.load();
  };
  const std::int64_t nanoseconds = when(*end.numbers_) - when(*start.numbers_);
  return static_cast<double>(nanoseconds) / kNanosecondsInMillisecond;
}

}  // namespace weightsync::emulator
