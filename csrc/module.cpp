// Python bindings of weightsync._C, and the translation of C++ errors.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/describe.h"
#include "backend/nccl/options.h"
#include "backend/nccl/process_group_nccl.h"
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
  py::class_<WorkShm, c10d::Work, Holder<WorkShm>>(
      module, "WorkShm", py::release_gil_before_calling_cpp_dtor())
      .def("fileno", &WorkShm::fileno, Unlocked(),
           "A descriptor that is readable once this work is finished.")
      .def("abort", &WorkShm::abort, Unlocked(), "Give the operation up.");
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
      .def_readwrite("net_name", &Config::net_name)
      .def_readwrite("comm_name", &Config::name);
  py::class_<OptionsNccl, c10d::Backend::Options, Holder<OptionsNccl>>(module,
                                                                       "NcclOptions")
      .def(py::init<std::chrono::milliseconds>(),
           py::arg("timeout") = kBackendDefaultTimeout)
      .def_readwrite("config", &OptionsNccl::config)
      .def_readwrite("is_high_priority_stream", &OptionsNccl::is_high_priority_stream)
      .def_readwrite("blocking_wait", &OptionsNccl::blocking_wait)
      .def_readwrite("library", &OptionsNccl::library);
  py::class_<ProcessGroupNccl, c10d::Backend, Holder<ProcessGroupNccl>>(
      module, "ProcessGroupNccl", py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](const Holder<c10d::Store>& store, int rank, int size,
                       const Holder<OptionsNccl>& options) {
             // Not a call guard: see ProcessGroupShm.
             const py::gil_scoped_release unlocked;
             return c10::make_intrusive<ProcessGroupNccl>(store, rank, size, options);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"));
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ core of weightsync.";
  module.attr("TORCH_VERSION") =
      std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
  py::register_exception_translator(&translate);
  bind_work(module);
  bind_window(module);
  bind_process_group(module);
  bind_nccl(module);
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
