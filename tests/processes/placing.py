"""Test bodies on a GPU: tensors are made there, and the CPU computes for the emulator.

Only the test's own code: what weightsync does is left to the GPU, as it is.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

if TYPE_CHECKING:
    from collections.abc import Iterator

DIRECT = frozenset({"empty", "empty_strided", "record_stream", "resize_", "set_"})
"""What needs no kernel, though it is no view."""

MAKERS = frozenset(_device_constructors()) - {torch.nested.nested_tensor}
"""What makes a tensor where it is told; a nested one is made of others."""

COPIES = frozenset({"copy_", "_to_copy", "clone"})
"""What needs no kernel either, as long as it copies bytes one after the other."""

LAUNCHED: Counter[str] = Counter()
"""What the CPU has computed for weightsync in this process: kernels on a real GPU."""

PLAIN = (Tensor, nn.Parameter, nn.Buffer)

COLLECTIVES = torch.ops._c10d_functional

EMPTY = torch.empty(0, dtype=torch.uint8)


@contextmanager
def placed(*, emulated: bool = True, kernels: bool = False) -> Iterator[None]:
    """Run the caller's code, a test's, on the current GPU, and threads that it starts.

    With ``kernels`` the CPU computes for weightsync too, where a test needs that.
    """

    def modes() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(_Placing())
        if emulated:
            stack.enter_context(_Computing(kernels=kernels))
        return stack

    def run(self: Any) -> None:
        with modes():
            bootstrap(self)

    bootstrap = vars(Thread)["_bootstrap_inner"]
    Thread._bootstrap_inner = run  # type: ignore[attr-defined] # of Python
    with modes():
        yield


def _of_the_library() -> bool:
    """Whether it is weightsync that calls torch now, and no test."""
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in {
            "threading",
            "weightsync",
        }:  # a thread that runs nothing of tests
            return True
        if package == "tests" and frame.f_globals["__name__"] != __name__:
            return False
        frame = frame.f_back
    return False


class _Placing(TorchFunctionMode):
    """Makes tensors on the current GPU where the test names no device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        made = func in MAKERS and options.get("device") is None
        if made and not _of_the_library():
            options["device"] = torch.device("cuda", torch.cuda.current_device())
        return func(*args, **options)


class _Computing(TorchDispatchMode):
    """Computes on the CPU what an emulated GPU would need a kernel for."""

    def __init__(self, *, kernels: bool) -> None:
        super().__init__()
        self._kernels = kernels

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if FakeTensor in types:  # of DTensor, to find out shapes
            return func(*args, **given)
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # as DTensor, which calls for its local parts again
        if func._can_decompose():  # in inference mode; may be a view or a copy
            with self:
                return func.decompose(*args, **given)
        name = func._schema.name.partition("::")[2]
        needed = not func.is_view and name not in DIRECT and _device(args, given)
        if not needed:
            return func(*args, **given)
        if _of_the_library():
            if not (self._kernels and _launches(name, args, given)):
                return func(*args, **given)
            LAUNCHED[name] += 1
        return _compute(func, args, given, needed)


def _device(args: Any, kwargs: Any) -> torch.device | None:
    """The GPU that an operation would run on; None if it is not one for a GPU."""
    asked = kwargs.get("device")
    if asked is not None and torch.device(asked).type == "cuda":
        return torch.device(asked)
    for value in tree_iter((args, kwargs)):
        if isinstance(value, Tensor) and value.is_cuda:
            return value.device
    return None


def _launches(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a GPU needs a kernel for it: copies are for the copy engine.

    What goes to the host or comes from there is converted on the host.
    """
    tensors = [value for value in args if isinstance(value, Tensor)]
    if name not in COPIES or not all(map(_in_a_row, tensors)):
        return True
    dtypes = {tensor.dtype for tensor in tensors} | {kwargs.get("dtype")}
    asked = torch.device(kwargs.get("device") or "cuda")
    within = asked.type == "cuda" and all(tensor.is_cuda for tensor in tensors)
    return within and len(dtypes - {None}) > 1


def _in_a_row(tensor: Tensor) -> bool:
    lazy = tensor.is_conj() or tensor.is_neg()
    return not lazy and (tensor.is_contiguous() or not tensor.is_cuda)


def _compute(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    torch.cuda.current_stream(device).synchronize()
    hosts: dict[int, Tensor] = {}
    originals: dict[int, Tensor] = {}

    def to_host(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_cuda or value.is_nested:
            return value
        if id(value) not in hosts:
            hosts[id(value)] = seen = on_host(value)
            originals[id(seen)] = value
        return hosts[id(value)]

    def to_device(value: Any) -> Any:
        if not isinstance(value, Tensor) or not wanted or not _plain(value):
            return value
        known = originals.get(id(value))
        return _copied(value, device) if known is None else known

    asked = kwargs.get("device")
    wanted = asked is None or torch.device(asked).type == "cuda"
    given = tree_map(to_host, dict(kwargs))
    if wanted and asked is not None:
        given["device"] = torch.device("cpu")
    found = func(*tree_map(to_host, args), **given)
    if func.namespace == COLLECTIVES.name:  # whose results are there when waited for
        found = tree_map(COLLECTIVES.wait_tensor, found)
    return tree_map(to_device, found)


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory, which is the host's on an emulated GPU."""
    storage = tensor.untyped_storage()
    plain = EMPTY.clone()
    if storage.nbytes():
        memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
        plain = torch.frombuffer(memory, dtype=torch.uint8)
    seen = torch.empty(0, dtype=tensor.dtype)
    seen.set_(
        plain.untyped_storage(),
        tensor.storage_offset(),
        tensor.size(),
        tensor.stride(),
    )
    if tensor.is_conj():
        seen = seen.conj()
    return torch._neg_view(seen) if tensor.is_neg() else seen


def _plain(tensor: Tensor) -> bool:
    """Whether it has strides; what has none stays where it was computed."""
    special = tensor.is_quantized or tensor.is_nested
    return tensor.layout == torch.strided and not special


def _copied(value: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_strided(
        value.size(), value.stride(), dtype=value.dtype, device=device
    )
    on_host(made).copy_(value)
    return made
