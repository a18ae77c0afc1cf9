// Python bindings of weightsync._C, and the translation of C++ errors.
#include <pybind11/chrono.h>
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/describe.h"
#include "backend/nccl/bell.h"
#include "backend/nccl/bootstrap.h"
#include "backend/nccl/memory_nccl.h"
#include "backend/nccl/options.h"
#include "backend/nccl/pinned.h"
#include "backend/nccl/process_group_nccl.h"
#include "backend/nccl/raising.h"
#include "backend/nccl/runs_nccl.h"
#include "backend/nccl/trace.h"
#include "backend/nccl/window_nccl.h"
#include "backend/process_group_shm.h"
#include "backend/repoint.h"
#include "backend/status_error.h"
#include "backend/window_shm.h"
#include "backend/work_shm.h"
#include "backend/writable.h"

namespace py = pybind11;

namespace weightsync {
namespace {

template <class T>
using Holder = c10::intrusive_ptr<T>;

using Unlocked = py::call_guard<py::gil_scoped_release>;

const char* class_for(shm::Code code) {
  switch (code) {
    case shm::Code::kInvalid:
      return "PlanError";
    case shm::Code::kClosed:
    case shm::Code::kCancelled:
      return "ClosedError";
    case shm::Code::kPeer:
      return "PeerError";
    case shm::Code::kTimedOut:
      return "TimedOutError";
    case shm::Code::kUnsupported:
      return "UnsupportedError";
    default:
      return "WeightSyncError";
  }
}

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const StatusError& status) {
    const py::object errors = py::module_::import("weightsync.errors");
    const py::object kind = errors.attr(class_for(status.code()));
    PyErr_SetString(kind.ptr(), status.what());
  }
}

void bind_work(py::module_& module) {
  py::class_<WorkShm, c10d::Work, Holder<WorkShm>> work(
      module, "WorkShm", py::release_gil_before_calling_cpp_dtor());
  work.attr("can_be_given_up") = true;
  work.def("fileno", &WorkShm::fileno, Unlocked(),
           "A descriptor that is readable once this work is finished.")
      .def("abort", &WorkShm::abort, Unlocked(), "Give the operation up.");
}

void bind_nccl_work(py::module_& module) {
  py::class_<WorkNccl, c10d::Work, Holder<WorkNccl>>(
      module, "WorkNccl", py::release_gil_before_calling_cpp_dtor())
      .def("fileno", &WorkNccl::fileno, Unlocked(),
           "A descriptor that is readable once this work is over.");
  py::class_<Bell, std::shared_ptr<Bell>>(module, "Bell")
      .def(py::init<>())
      .def("fileno", &Bell::fileno)
      .def("close", &Bell::close)
      .def(
          "ring_after",
          [](const std::shared_ptr<Bell>& bell, std::int64_t stream, int device) {
            Bell::ring_after(bell, c10::Stream::unpack3(
                                       stream, static_cast<c10::DeviceIndex>(device),
                                       c10::DeviceType::CUDA));
          },
          py::arg("stream"), py::arg("device"), Unlocked(),
          "Ring when this stream, by its id, has done what it was given until now.");
}

void bind_copies(py::module_& module) {
  module.def("copy_into", &copy_into, py::arg("memory"), py::arg("tensors"),
             py::arg("runs"), Unlocked(),
             "Copy runs of tensors into memory of their GPU, on the current stream.");
}

void bind_window(py::module_& module) {
  py::class_<WindowShm, c10d::Window, Holder<WindowShm>>(
      module, "WindowShm", py::release_gil_before_calling_cpp_dtor())
      .def("put_many", &WindowShm::put_many, py::arg("tensors"), py::arg("runs"),
           py::arg("dst_rank"), py::arg("signals"), py::arg("async_op"), Unlocked())
      .def("wait_signals", &WindowShm::wait_signals, py::arg("peers"),
           py::arg("counts"), py::arg("timeout"), py::arg("async_op"), Unlocked())
      .def("copy_local", &WindowShm::copy_local, py::arg("tensors"), py::arg("runs"),
           py::arg("to_window"), py::arg("async_op"), Unlocked())
      .def("available_signals", &WindowShm::available_signals, py::arg("peer_rank"),
           Unlocked())
      .def("connect", &WindowShm::connect, py::arg("peers"), Unlocked())
      .def("prepare", &WindowShm::prepare, py::arg("runs"), py::arg("dst"), Unlocked())
      .def("peer_nbytes", &WindowShm::peer_nbytes, py::arg("peer_rank"), Unlocked());
}

void bind_nccl_window(py::module_& module) {
  py::class_<WindowNccl, c10d::Window, Holder<WindowNccl>>(
      module, "WindowNccl", py::release_gil_before_calling_cpp_dtor())
      .def("put_many", &WindowNccl::put_many, py::arg("tensors"), py::arg("runs"),
           py::arg("dst_rank"), py::arg("signals"), py::arg("async_op"), Unlocked())
      .def("wait_signals", &WindowNccl::wait_signals, py::arg("peers"),
           py::arg("counts"), py::arg("timeout"), py::arg("async_op"), Unlocked())
      .def("copy_local", &WindowNccl::copy_local, py::arg("tensors"), py::arg("runs"),
           py::arg("to_window"), py::arg("async_op"), Unlocked())
      .def("connect", &WindowNccl::connect, py::arg("peers"), Unlocked())
      .def("prepare", &WindowNccl::prepare, py::arg("runs"), py::arg("dst"), Unlocked())
      .def("peer_nbytes", &WindowNccl::peer_nbytes, py::arg("peer_rank"), Unlocked());
}

// torch's memory pools take its own kind of allocator, which is one for the process:
// pools do not keep it alive.
py::object nccl_allocator() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> made;
  return made
      .call_once_and_store_result([] {
        const auto [allocate, free] = nccl_memory_functions();
        return py::module_::import("torch._C")
            .attr("_cuda_customAllocator")(allocate, free);
      })
      .get_stored();
}

void bind_process_group(py::module_& module) {
  py::class_<ProcessGroupShm, c10d::Backend, Holder<ProcessGroupShm>>(
      module, "ProcessGroupShm", py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](const Holder<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, bool enable_reconfigure) {
             // Not a call guard: pybind11 registers the instance after this, with the
             // GIL.
             const py::gil_scoped_release unlocked;
             return c10::make_intrusive<ProcessGroupShm>(store, rank, size, timeout,
                                                         enable_reconfigure);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
           py::arg("enable_reconfigure"));
}

void bind_nccl(py::module_& module) {
  using nccl::Config;
  py::class_<Config>(module, "NcclConfig")
      .def(py::init<>())
      .def_readwrite("cga_cluster_size", &Config::cga_cluster_size)
      .def_readwrite("min_ctas", &Config::min_ctas)
      .def_readwrite("max_ctas", &Config::max_ctas)
      .def_readwrite("cta_policy", &Config::cta_policy)
      .def_readwrite("split_share", &Config::split_share)
      .def_readwrite("shrink_share", &Config::shrink_share)
      .def_readwrite("traffic_class", &Config::traffic_class)
      .def_readwrite("collnet_enable", &Config::collnet_enable)
      .def_readwrite("nvls_ctas", &Config::nvls_ctas)
      .def_readwrite("n_channels_per_net_peer", &Config::n_channels_per_net_peer)
      .def_readwrite("nvlink_centric_sched", &Config::nvlink_centric_sched)
      .def_readwrite("net_name", &Config::net_name)
      .def_readwrite("comm_name", &Config::name);
  py::class_<OptionsNccl, c10d::Backend::Options, Holder<OptionsNccl>>(module,
                                                                       "NcclOptions")
      .def(py::init<std::chrono::milliseconds>(),
           py::arg("timeout") = kBackendDefaultTimeout)
      .def_readwrite("config", &OptionsNccl::config)
      .def_readwrite("is_high_priority_stream", &OptionsNccl::is_high_priority_stream)
      .def_readwrite("blocking_wait", &OptionsNccl::blocking_wait)
      .def_readwrite("library", &OptionsNccl::library)
      .def_readwrite("group_desc", &OptionsNccl::group_desc)
      .def_readwrite("trace_prefix", &OptionsNccl::trace_prefix)
      .def("clone", [](const OptionsNccl& options) {
        return c10::make_intrusive<OptionsNccl>(options);
      });
  py::class_<ProcessGroupNccl, c10d::Backend, Holder<ProcessGroupNccl>>(
      module, "ProcessGroupNccl", py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](const Holder<c10d::Store>& store, int rank, int size,
                       const Holder<OptionsNccl>& options) {
             // Not a call guard: see ProcessGroupShm.
             const py::gil_scoped_release unlocked;
             return c10::make_intrusive<ProcessGroupNccl>(store, rank, size, options);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def_property_readonly(
          "mem_allocator", [](const ProcessGroupNccl&) { return nccl_allocator(); },
          "Of memory for windows, for torch.cuda.MemPool.")
      .def_property_readonly(
          "nccl_version",
          [](const ProcessGroupNccl& group) { return group.library()->version_text(); })
      .def_property_readonly("quarantined", &ProcessGroupNccl::quarantined,
                             "After an abort: NCCL did not end, and is left to itself.")
      .def_property_readonly(
          "nccl_library",
          [](const ProcessGroupNccl& group) { return group.library()->path(); })
      .def(
          "split",
          [](ProcessGroupNccl& group, const Holder<c10d::Store>& store,
             const std::vector<int>& ranks, const Holder<OptionsNccl>& options) {
            const py::gil_scoped_release unlocked;
            return c10::dynamic_intrusive_pointer_cast<ProcessGroupNccl>(
                group.split(store, ranks, options));
          },
          py::arg("store"), py::arg("ranks"), py::arg("options"))
      // By torch, where others make a group that this rank is no member of.
      .def(
          "perform_nocolor_split",
          [](ProcessGroupNccl& group, const py::object&) {
            const py::gil_scoped_release unlocked;
            group.split_nothing();
          },
          py::arg("device"));
  module.def("map_again", &map_nccl_tensor_again, py::arg("tensor"), Unlocked(),
             "The same memory of NCCL at one more address.");
  module.def("nccl_allocator", &nccl_allocator,
             "Of memory that NCCL can register, for torch.cuda.MemPool.");
  module.def(
      "nccl_allocation",
      [](const at::Tensor& tensor)
          -> std::optional<std::pair<std::uintptr_t, std::size_t>> {
        const auto found = allocation_of(tensor.const_data_ptr());
        if (!found) return std::nullopt;
        return std::pair(reinterpret_cast<std::uintptr_t>(found->base), found->bytes);
      },
      py::arg("tensor"), Unlocked(),
      "Address and bytes of the allocation of NCCL that a tensor begins in, if any.");
  module.def(
      "find_nccl",
      [](const std::string& path) {
        auto found = library_for(path);
        raise(found.status());
        return std::pair(found.value()->version_text(), found.value()->path());
      },
      py::arg("library") = "", Unlocked(),
      "The version of the NCCL that groups with this option use, and its file.");
}

void bind_pinned(py::module_& module) {
  py::class_<PinnedMemory>(module, "PinnedMemory")
      .def(py::init<at::Tensor>(), py::arg("memory"), Unlocked(),
           "Pin bytes of the host.")
      .def("copy_in", &PinnedMemory::copy_in, py::arg("tensors"), py::arg("runs"),
           Unlocked(), "Copy runs of tensors on a GPU into it, on the current stream.")
      .def("close", &PinnedMemory::close, Unlocked(), "Unpin.");
}

void bind_trace(py::module_& module) {
  module.def("trace_json", &trace::json, py::arg("reason"), Unlocked(),
             "What the flight recorder holds, as JSON.");
  module.def(
      "dump_trace",
      [](const std::string& prefix, const std::string& reason) {
        const recorder::Files files = unwrap(trace::dump(prefix, reason));
        return std::make_pair(files.json, files.pickle);
      },
      py::arg("prefix"), py::arg("reason"), Unlocked(),
      "Write what the flight recorder holds; return the names of both files.");
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ core of weightsync.";
  module.attr("TORCH_VERSION") =
      std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
  py::register_exception_translator(&translate);
  bind_work(module);
  bind_nccl_work(module);
  bind_copies(module);
  bind_window(module);
  bind_nccl_window(module);
  bind_process_group(module);
  bind_nccl(module);
  bind_pinned(module);
  bind_trace(module);
  module.def("describe", &describe, py::arg("tensors"),
             "Everything about these tensors that a layout depends on, as bytes: equal "
             "bytes mean an equal layout.");
  module.def("repoint", &repoint, py::arg("tensors"), py::arg("memory"),
             py::arg("offsets"),
             "Exchange the memory of the tensors' storages, for all who share them.");
  module.def("first_unwritable", &first_unwritable, py::arg("tensors"), Unlocked(),
             "The index of the first tensor that cannot be written, or -1.");
}

}  // namespace weightsync
