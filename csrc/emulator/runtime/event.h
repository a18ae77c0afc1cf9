// Event: a point in a stream that others wait for, in this process or in another.
//
// Recording takes the next number; the stream stores it as reached, in the slot of that
// number. Who waits takes the number recorded last and waits until its slot has it, so
// recording again, also on a faster stream, does not move a wait that was asked for
// before, unless it is done kSlots times. The numbers lie in shared memory where the
// event is interprocess. Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "cuda/abi.h"
#include "emulator/core.h"
#include "outcome.h"
#include "shm/futex.h"
#include "shm/segment.h"

namespace weightsync::emulator {

class Event {
 public:
  static shm::Result<std::shared_ptr<Event>> create(int device, unsigned flags);
  // The event of another process, by the segment that it keeps its numbers in.
  static shm::Result<std::shared_ptr<Event>> open(int device,
                                                  const shm::Locator& locator);

  int device() const { return device_; }
  unsigned flags() const { return flags_; }
  // Only of an interprocess event.
  shm::Locator locator() const { return segment_->locator(); }
  bool is_ours() const { return ours_; }

  void record(Stream& stream);
  void wait_on(Stream& stream);
  void synchronize();
  bool is_recorded() const { return numbers_->recorded != 0; }
  bool is_reached() const { return numbers_->has(numbers_->recorded); }

  // Milliseconds from the last recording of `start` to that of `end`, both reached.
  static double elapsed(const Event& start, const Event& end);

 private:
  static constexpr std::size_t kSlots = 64;

  // Zeroes at first.
  struct Numbers {
    struct Slot {
      std::atomic<std::uint64_t> reached;
      std::atomic<std::int64_t> when;  // nanoseconds of the steady clock
    };

    Slot& slot(std::uint64_t number) { return slots[number % kSlots]; }
    bool has(std::uint64_t number) { return slot(number).reached >= number; }

    std::atomic<std::uint64_t> recorded;
    shm::Doorbell bell;
    std::array<Slot, kSlots> slots;
  };

  Event(int device, unsigned flags, std::shared_ptr<shm::Segment> segment, bool ours);

  static void reach(Numbers& numbers, std::uint64_t number);
  static void wait(Numbers& numbers, std::uint64_t number);

  // Constant after construction.
  const int device_;
  const unsigned flags_;
  const bool ours_;
  const std::shared_ptr<shm::Segment> segment_;  // null unless interprocess
  const std::shared_ptr<Numbers> numbers_;       // shared with the operations
};

}  // namespace weightsync::emulator
