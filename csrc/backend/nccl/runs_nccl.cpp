#include "backend/nccl/runs_nccl.h"

#include <c10/core/DeviceGuard.h>

#include <string>

#include "backend/nccl/raising.h"
#include "backend/nccl/session.h"
#include "cuda/runtime.h"

namespace weightsync {
namespace {

using shm::Code;

struct Memory {
  std::byte* base = nullptr;
  std::uint64_t nbytes = 0;  // from base to the end of the storage
  bool on_host = false;
};

bool is_allowed(const at::Tensor& tensor, c10::Device device, Sides sides) {
  if (!tensor.defined()) return false;
  return tensor.device() == device ||
         (sides == Sides::kDeviceOrHost && tensor.is_cpu());
}

Memory memory_of(const at::Tensor& tensor, c10::Device device, Sides sides) {
  check(is_allowed(tensor, device, sides), Code::kInvalid, [&] {
    return "runs are of tensors on " + device.str() + "; found one on " +
           (tensor.defined() ? tensor.device().str() : "no device");
  });
  check(
      !tensor.is_conj() && !tensor.is_neg(), Code::kInvalid,
      "a lazily conjugated or negated tensor has other bytes than it shows: resolve it "
      "first");
  const auto skipped = static_cast<std::uint64_t>(tensor.storage_offset()) *
                       static_cast<std::uint64_t>(tensor.element_size());
  const std::uint64_t total = tensor.storage().nbytes();
  return {static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr())),
          total > skipped ? total - skipped : 0, tensor.is_cpu()};
}

}  // namespace

std::vector<RunNccl> resolve_runs(const std::vector<at::Tensor>& tensors,
                                  const at::Tensor& table, std::int64_t window_nbytes,
                                  c10::Device device, Sides sides) {
  check_table(table);
  std::vector<Memory> memory;
  memory.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    memory.push_back(memory_of(tensor, device, sides));
  }
  std::vector<RunNccl> runs;
  runs.reserve(static_cast<std::size_t>(table.size(0)));
  const auto* row = table.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < table.size(0); ++i, row += kRunColumns) {
    const std::size_t index = tensor_of_run(row, i, memory.size());
    const Memory& side = memory[index];
    check_run(row, i, side.nbytes, static_cast<std::uint64_t>(window_nbytes));
    runs.push_back({index, side.base + row[1], side.on_host,
                    static_cast<std::size_t>(row[2]), static_cast<std::size_t>(row[3]),
                    static_cast<std::size_t>(row[4]), static_cast<std::size_t>(row[5]),
                    static_cast<std::size_t>(row[6])});
  }
  return runs;
}

void copy_rows(std::byte* target, std::size_t target_stride, const std::byte* source,
               std::size_t source_stride, const RunNccl& run, cudaMemcpyKind kind,
               cudaStream_t stream) {
  const cuda::Runtime& runtime = cuda::runtime();
  if (run.is_one_piece()) {
    raise(runtime.check(
        runtime.memcpy_async(target, source, run.rows * run.row_bytes, kind, stream),
        "cudaMemcpyAsync"));
  } else if (target_stride >= run.row_bytes && source_stride >= run.row_bytes) {
    raise(runtime.check(
        runtime.memcpy_2d_async(target, target_stride, source, source_stride,
                                run.row_bytes, run.rows, kind, stream),
        "cudaMemcpy2DAsync"));
  } else {
    for (std::size_t row = 0; row < run.rows; ++row) {
      raise(runtime.check(runtime.memcpy_async(target + row * target_stride,
                                               source + row * source_stride,
                                               run.row_bytes, kind, stream),
                          "cudaMemcpyAsync"));
    }
  }
}

void copy_into(const at::Tensor& memory, const std::vector<at::Tensor>& tensors,
               const at::Tensor& table) {
  check(memory.defined() && memory.is_cuda() && memory.is_contiguous(), Code::kInvalid,
        "runs are copied into contiguous memory of a GPU");
  const c10::DeviceGuard on(memory.device());
  const auto nbytes = static_cast<std::int64_t>(memory.nbytes());
  auto* const base = static_cast<std::byte*>(memory.data_ptr());
  const cudaStream_t stream = handle_of(current_stream(memory.device()));
  for (const RunNccl& run :
       resolve_runs(tensors, table, nbytes, memory.device(), Sides::kDeviceOrHost)) {
    if (run.empty()) continue;
    copy_rows(base + run.at_window, run.window_stride, run.at_tensor, run.tensor_stride,
              run, run.kind(), stream);
  }
}

}  // namespace weightsync
