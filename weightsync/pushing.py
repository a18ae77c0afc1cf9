"""One push as a trainer rank sees it: how it was called, and what it holds."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

import anyio
from msgspec.structs import replace

from weightsync.errors import ClosedError, PlanError
from weightsync.messages import Fault, PushEnded, PushRequest, Terms
from weightsync.window import as_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weightsync.layout import Captured
    from weightsync.names import Rule
    from weightsync.remembered import Remembered

CHUNK_BYTES: Final = 16 << 20
"""A push that is given up is noticed so often while its tensors are digested."""

_NO_DIGEST: Final = bytes(16)


@dataclass(frozen=True, slots=True)
class PushOptions:
    """What a push is called with. Raises PlanError for what is no option of it.

    All ranks must agree on the ``terms``; the others are each rank's own. ``after`` is
    the engine's mark of what the caller gave the device to do before.
    """

    terms: Terms
    timeout: float
    ignore: Sequence[str]
    names: Sequence[Rule]
    after: Any = None

    def __post_init__(self) -> None:
        """Check, and let everything be of Python's own types."""
        given = self.terms
        _check_choice("on_busy", given.on_busy, ("wait", "skip"))
        _check_choice("require", given.require, ("any", "all"))
        terms = replace(
            given,
            version=_integer(given.version),
            partial=bool(given.partial),
            cast=bool(given.cast),
            check_replicas=bool(given.check_replicas),
        )
        object.__setattr__(self, "terms", terms)


def request(
    number: int,
    options: PushOptions,
    captured: Captured | Fault,
    sent: Remembered[bytes, None],
    timeout: float,
) -> PushRequest:
    """What a rank asks the leader; with its manifest unless that was ``sent``."""
    digest, manifest, fault = _NO_DIGEST, None, None
    if isinstance(captured, Fault):
        fault = captured
    else:
        digest = captured.manifest.digest
        if not sent.use(digest):
            sent.put(digest, None)
            manifest = captured.manifest
    return PushRequest(
        push=number,
        terms=options.terms,
        timeout=timeout,
        digest=digest,
        manifest=manifest,
        fault=fault,
    )


def _check_choice(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise PlanError(f"{name} is {' or '.join(map(repr, known))}, not {value!r}")


def _integer(version: object) -> int | None:
    if version is None:
        return None
    number = version.__index__() if isinstance(version, SupportsIndex) else -1
    if isinstance(version, bool) or not 0 < number < 2**62:
        raise PlanError(f"a version is an integer from 1 to 2**62, not {version!r}")
    return number


class Push:
    """The push under way on this rank."""

    def __init__(
        self, number: int, captured: Captured | Fault, after: Any = None
    ) -> None:
        self.number: Final = number
        self.after: Final = after
        self.captured: Final = captured
        self.ended = anyio.Event()
        self.outcome: PushEnded | None = None
        self._readers = 0
        self._stopping = False
        self._idle = anyio.Event()

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """What is put."""
        return () if isinstance(self.captured, Fault) else self.captured.tensors

    # Who reads the caller's tensors

    @property
    def is_read(self) -> bool:
        """Whether anything reads the tensors now."""
        return self._readers > 0

    def begin_reading(self) -> bool:
        """Let something read the tensors until ``end_reading``; False if given up."""
        if not self._stopping:
            self._readers += 1
        return not self._stopping

    def end_reading(self) -> None:
        """It reads no more."""
        self._readers -= 1
        if self._readers == 0:
            self._idle.set()

    async def stop_reading(self) -> None:
        """Let nothing begin to read, and return when nothing does."""
        self._stopping = True
        while self._readers:
            self._idle = anyio.Event()
            await self._idle.wait()

    def digest(self, pieces: Sequence[int]) -> tuple[bytes, ...]:
        """Digest the bytes of some tensors, at about 1 GB/s. Blocks.

        Raises ClosedError when the push is given up meanwhile, PlanError for a tensor
        that has lost its memory.
        """
        return tuple([self._digest(index) for index in pieces])

    def _digest(self, index: int) -> bytes:
        for event in self.after or ():
            event.synchronize()
        data = as_bytes(self.tensors[index])
        if data.untyped_storage().nbytes() < data.storage_offset() + data.numel():
            raise PlanError(f"{self._name(index)!r}: its storage was freed")
        found = blake2b(digest_size=16)
        for start in range(0, data.numel(), CHUNK_BYTES):
            if self._stopping:
                raise ClosedError("the push was given up")
            chunk = data[start : start + CHUNK_BYTES].cpu()
            memory = ctypes.c_char * chunk.numel()
            found.update(memory.from_address(chunk.data_ptr()))
        return found.digest()

    def _name(self, index: int) -> str:
        captured = self.captured
        return "" if isinstance(captured, Fault) else captured.manifest.names[index]
