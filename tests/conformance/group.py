"""What every rank of a conformance test does first and last."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from tests.conformance.values import octets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TIMEOUT: Final = timedelta(seconds=30)

Answer = bytes | str
"""The bytes of an operation's tensors, or the error that it raised."""


@dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """An error that speaks of one of these: what a test expects to be answered."""

    words: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        """Whether the other is the text of such an error."""
        return isinstance(other, str) and any(
            word in other.lower() for word in self.words
        )

    __hash__ = None  # type: ignore[assignment]  # Not equal to itself, nor in sets.


def rank() -> int:
    """Return the rank of this process, which is the index of its GPU too."""
    return int(os.environ["RANK"])


def world() -> int:
    """Return the number of ranks."""
    return int(os.environ["WORLD_SIZE"])


@contextmanager
def job(backend: str, **options: Any) -> Iterator[torch.device]:
    """Bind this process to its GPU and open the default group; destroy it at the end.

    ``options`` are those of ``init_process_group``. If the body raises, the group is
    left as it is, so that what it raised is what the test reports.
    """
    # torch reads it when a process first names the backend `nccl`, and without it 2.15
    # makes an `nccl2`.
    os.environ["TORCH_DIST_USE_NCCL2"] = "0"
    # Registers ours.
    import weightsync.backend  # noqa: F401

    device = torch.device("cuda", rank())
    torch.cuda.set_device(device)
    dist.init_process_group(
        backend, **{"timeout": TIMEOUT, "device_id": device, **options}
    )
    yield device
    dist.destroy_process_group()


@contextmanager
def at_once() -> Iterator[None]:
    """End the process if the body raises: its own end would wait for other ranks."""
    try:
        yield
    # Whatever it is, the other ranks wait for this one.
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def answer(call: Callable[[], object], tensors: Sequence[torch.Tensor] = ()) -> Answer:
    """Return the bytes of all the tensors after the call, or the error it raised."""
    return error_of(call) or b"".join(map(octets, tensors))


def error_of(call: Callable[[], object]) -> str:
    """Return the error that a call raises, or nothing."""
    try:
        call()
    # Whatever a backend answers is its answer: the test compares it.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""
