// CUDA driver: operations of streams that the runtime has no function for.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "emulator/core.h"
#include "failure.h"

namespace weightsync::emulator {
namespace {

// CU_STREAM_WAIT_VALUE_...
enum Comparison : unsigned { kGreaterEqual = 0, kEqual = 1, kAnd = 2, kNor = 3 };

template <class Value>
bool holds(Value found, Value wanted, unsigned comparison) {
  using Signed = std::make_signed_t<Value>;
  switch (comparison) {
    case kGreaterEqual:
      return static_cast<Signed>(found - wanted) >= 0;
    case kEqual:
      return found == wanted;
    case kAnd:
      return (found & wanted) != 0;
    default:
      return static_cast<Value>(~(found | wanted)) != 0;
  }
}

// Whoever writes the value, a peer included, rings no bell.
template <class Value>
void poll(const std::atomic<Value>& word, Value wanted, unsigned comparison) {
  constexpr std::chrono::microseconds kPause{20};
  while (!holds(word.load(), wanted, comparison)) std::this_thread::sleep_for(kPause);
}

template <class Value>
std::atomic<Value>* word_at(CUdeviceptr address) {
  static_assert(sizeof(std::atomic<Value>) == sizeof(Value));
  return reinterpret_cast<std::atomic<Value>*>(address);  // NOLINT: an address it is
}

template <class Value>
CUresult check(const char* function, const std::shared_ptr<Stream>& stream,
               CUdeviceptr address) {
  constexpr auto kBadHandle = static_cast<CUresult>(cudaErrorInvalidResourceHandle);
  if (stream == nullptr) return fail(function, kBadHandle, "this is no stream");
  if (address % sizeof(Value) != 0) {
    return fail(function, CUDA_ERROR_INVALID_VALUE, "the address is not aligned");
  }
  return answer(function, check_range(word_at<Value>(address), sizeof(Value)));
}

template <class Value>
CUresult write_value(const char* function, CUstream_st* handle, CUdeviceptr address,
                     Value value) {
  const std::shared_ptr<Stream> stream = stream_of(handle);
  const CUresult fits = check<Value>(function, stream, address);
  if (fits != CUDA_SUCCESS) return fits;
  stream->enqueue(function, [word = word_at<Value>(address), value] { *word = value; });
  return CUDA_SUCCESS;
}

template <class Value>
CUresult wait_value(const char* function, CUstream_st* handle, CUdeviceptr address,
                    Value value, unsigned flags) {
  constexpr unsigned kComparisons = 3;
  const std::shared_ptr<Stream> stream = stream_of(handle);
  const CUresult fits = check<Value>(function, stream, address);
  if (fits != CUDA_SUCCESS) return fits;
  const unsigned comparison = flags & kComparisons;
  stream->enqueue(function, [word = word_at<Value>(address), value, comparison] {
    set_operation_note("a value in memory to become " + std::to_string(value), "");
    poll(*word, value, comparison);
  });
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace weightsync::emulator

using namespace weightsync::emulator;  // NOLINT: this file is the edge

#pragma GCC visibility push(default)
extern "C" {

CUresult cuStreamWriteValue32_v2(CUstream_st* stream, CUdeviceptr address,
                                 std::uint32_t value, unsigned) {
  return write_value(__func__, stream, address, value);
}

CUresult cuStreamWriteValue64_v2(CUstream_st* stream, CUdeviceptr address,
                                 std::uint64_t value, unsigned) {
  return write_value(__func__, stream, address, value);
}

CUresult cuStreamWaitValue32_v2(CUstream_st* stream, CUdeviceptr address,
                                std::uint32_t value, unsigned flags) {
  return wait_value(__func__, stream, address, value, flags);
}

CUresult cuStreamWaitValue64_v2(CUstream_st* stream, CUdeviceptr address,
                                std::uint64_t value, unsigned flags) {
  return wait_value(__func__, stream, address, value, flags);
}

CUresult cuStreamWriteValue32(CUstream_st* stream, CUdeviceptr address,
                              std::uint32_t value, unsigned) {
  return write_value(__func__, stream, address, value);
}

CUresult cuStreamWriteValue64(CUstream_st* stream, CUdeviceptr address,
                              std::uint64_t value, unsigned) {
  return write_value(__func__, stream, address, value);
}

CUresult cuStreamWaitValue32(CUstream_st* stream, CUdeviceptr address,
                             std::uint32_t value, unsigned flags) {
  return wait_value(__func__, stream, address, value, flags);
}

CUresult cuStreamWaitValue64(CUstream_st* stream, CUdeviceptr address,
                             std::uint64_t value, unsigned flags) {
  return wait_value(__func__, stream, address, value, flags);
}

CUresult cuStreamGetCtx(CUstream_st* handle, CUcontext* context) {
  const std::shared_ptr<Stream> stream = stream_of(handle);
  constexpr auto kBadHandle = static_cast<CUresult>(cudaErrorInvalidResourceHandle);
  if (stream == nullptr) return fail(__func__, kBadHandle, "this is no stream");
  return cuDevicePrimaryCtxRetain(context, stream->device());
}

CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, std::size_t count,
                          CUstream_st* handle) {
  const std::shared_ptr<Stream> stream = stream_of(handle);
  const CUresult fits = check<unsigned>(__func__, stream, address);
  if (fits != CUDA_SUCCESS) return fits;
  auto* const words = reinterpret_cast<unsigned*>(address);  // NOLINT: an address it is
  const CUresult whole = answer(__func__, check_range(words, count * sizeof(unsigned)));
  if (whole != CUDA_SUCCESS) return whole;
  stream->enqueue(__func__, [words, value, count] {
    for (std::size_t each = 0; each < count; ++each) words[each] = value;
  });
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
