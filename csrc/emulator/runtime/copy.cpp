#include "copy.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace weightsync::emulator {
namespace {

using Place = std::optional<Allocation>;

bool is_host(const Place& place) { return !place || !is_device_memory(place->kind); }

const char* words(cudaMemcpyKind kind) {
  switch (kind) {
    case cudaMemcpyHostToHost:
      return "host to host";
    case cudaMemcpyHostToDevice:
      return "host to device";
    case cudaMemcpyDeviceToHost:
      return "device to host";
    case cudaMemcpyDeviceToDevice:
      return "device to device";
    case cudaMemcpyDefault:
      return "either way";
  }
  return "an unknown way";
}

std::string words(const Place& place, const void* address) {
  if (!place) return show(address) + ", which is pageable host memory";
  return show(address) + ", which is in " + describe(*place);
}

// Pinned and managed memory is both: the device reaches it at the same address.
Outcome check_kind(const Copy& copy, const Place& from, const Place& to) {
  const bool from_device =
      copy.kind == cudaMemcpyDeviceToHost || copy.kind == cudaMemcpyDeviceToDevice;
  const bool to_device =
      copy.kind == cudaMemcpyHostToDevice || copy.kind == cudaMemcpyDeviceToDevice;
  const bool from_fits = from_device ? from.has_value() : is_host(from);
  const bool to_fits = to_device ? to.has_value() : is_host(to);
  const bool fits = copy.kind == cudaMemcpyDefault || (from_fits && to_fits);
  if (fits && copy.kind >= cudaMemcpyHostToHost && copy.kind <= cudaMemcpyDefault) {
    return {};
  }
  return invalid(std::string("asked to copy ") + words(copy.kind) + " from " +
                 words(from, copy.from) + " to " + words(to, copy.to));
}

Outcome check_span(Machine& machine, const Place& place, const void* address,
                   std::size_t nbytes) {
  if (!place) return {};
  return outcome_of(machine.memory().check_range(address, nbytes));
}

Outcome check_pitches(const Copy& copy) {
  if (copy.to_pitch >= copy.width && copy.from_pitch >= copy.width) return {};
  return {cudaErrorInvalidPitchValue, "rows of " + std::to_string(copy.width) +
                                          " bytes do not fit pitches of " +
                                          std::to_string(copy.from_pitch) + " and " +
                                          std::to_string(copy.to_pitch)};
}

void carry_out(const Copy& copy) {
  for (std::size_t row = 0; row < copy.height; ++row) {
    std::memmove(copy.to + row * copy.to_pitch, copy.from + row * copy.from_pitch,
                 copy.width);
  }
}

// The copy, of the bytes that its pageable source holds now.
std::function<void()> staged(const Copy& copy) {
  auto bytes =
      std::make_shared<std::vector<std::byte>>(copy.from, copy.from + copy.from_span());
  return [copy, bytes] {
    Copy late = copy;
    late.from = bytes->data();
    carry_out(late);
  };
}

}  // namespace

Outcome copy_on(Machine& machine, const std::shared_ptr<QueuedStream>& stream,
                const char* what, const Copy& copy, Wait wait) {
  if (copy.width == 0 || copy.height == 0) return {};
  if (Outcome pitches = check_pitches(copy); !pitches.ok()) return pitches;
  const Place from = machine.memory().find(copy.from);
  const Place to = machine.memory().find(copy.to);
  if (Outcome kind = check_kind(copy, from, to); !kind.ok()) return kind;
  Outcome fits = check_span(machine, from, copy.from, copy.from_span());
  if (fits.ok()) fits = check_span(machine, to, copy.to, copy.to_span());
  if (!fits.ok()) return fits;

  const bool to_pageable = !to.has_value();
  if (!from && !to_pageable) {
    stream->enqueue(what, staged(copy));
  } else {
    stream->enqueue(what, [copy] { carry_out(copy); });
  }
  const bool on_device = !is_host(from) && !is_host(to);
  const bool waits = to_pageable || (wait == Wait::kUnlessOnDevice && !on_device);
  if (waits) stream->synchronize();
  return waits ? machine.faults().of(stream->device()) : Outcome();
}

Outcome fill_on(Machine& machine, const std::shared_ptr<QueuedStream>& stream,
                const char* what, const Fill& fill) {
  if (fill.width == 0 || fill.height == 0) return {};
  if (fill.pitch < fill.width) {
    return {cudaErrorInvalidPitchValue, "rows of " + std::to_string(fill.width) +
                                            " bytes do not fit a pitch of " +
                                            std::to_string(fill.pitch)};
  }
  const std::size_t span = fill.pitch * (fill.height - 1) + fill.width;
  if (Outcome fits = outcome_of(machine.memory().check_range(fill.to, span));
      !fits.ok()) {
    return fits;
  }
  const Place to = machine.memory().find(fill.to);
  if (to && !is_host(to) && !machine.can_access(stream->device(), to->device)) {
    return invalid(stream->name() + " cannot reach " + describe(*to) +
                   ": peer access is not enabled");
  }
  stream->enqueue(what, [fill] {
    for (std::size_t row = 0; row < fill.height; ++row) {
      std::memset(fill.to + row * fill.pitch, fill.value, fill.width);
    }
  });
  return {};
}

}  // namespace weightsync::emulator
