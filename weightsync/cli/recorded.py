"""What the flight recorders of a job's ranks wrote, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import msgspec

from weightsync.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

FORMAT: Final = 1


class Kind(Enum):
    """How ranks have to answer each other's calls."""

    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "recv"
    SIGNAL = "signal"  # put and signal
    WAIT = "wait_signal"
    MEMBERSHIP = "membership"


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """A process group with these members, which are ranks of the job."""

    name: str
    ranks: tuple[int, ...]
    # A rank that made no call yet may not know it.
    description: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Name it as torch does."""
        return f"group {self.name!r} ({self.description})"


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor without its contents."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of elements, by which NCCL knows a tensor."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        """Write it as ``Float[2, 3]``."""
        return f"{self.dtype}{list(self.sizes)}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One call in one rank.

    ``number`` is what all members count alike: that of the collective, of the messages
    to or from ``peer``, or of the signals to or from it, this call included.
    """

    kind: Kind
    name: str
    group: Group
    rank: int
    number: int
    peer: int | None
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    nbytes: int
    finished: bool
    seconds: float
    where: str

    def __str__(self) -> str:
        """Name it, with what it moves."""
        shapes = ", ".join(map(str, self.inputs or self.outputs))
        moved = f" of {shapes}" if shapes else f" of {self.nbytes} bytes"
        return self.name + (moved if shapes or self.nbytes else "")


@dataclass(frozen=True, slots=True)
class Dump:
    """What one rank recorded, in the order of its calls.

    Seconds of operations are how long before the dump they were called.
    """

    rank: int
    host: str
    process: int
    reason: str
    groups: tuple[Group, ...]
    operations: tuple[Operation, ...]


class _Frame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _Group(msgspec.Struct):
    id: int
    name: str
    description: str
    ranks: tuple[int, ...]


class _Call(msgspec.Struct):
    pg_id: int
    state: str
    time_created_ns: int
    peer: int | None
    with_peer: int
    frames: list[_Frame]


class _Entry(_Call):
    profiling_name: str
    is_p2p: bool
    collective_seq_id: int
    input_sizes: list[tuple[int, ...]]
    input_dtypes: list[str]
    output_sizes: list[tuple[int, ...]]
    output_dtypes: list[str]


class _Other(_Call):
    name: str
    bytes: int
    op_id: int


class _Own(msgspec.Struct):
    format: int
    rank: int
    process: int
    host: str
    time_ns: int
    reason: str
    groups: list[_Group]
    operations: list[_Other]


class _File(msgspec.Struct):
    entries: list[_Entry]
    weightsync: _Own


def find(paths: Iterable[Path]) -> list[Path]:
    """Return the dumps among files, and those below folders.

    Raises:
        PlanError: there is none, or a path is not there.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            below = [*path.glob("*.json"), *path.glob("*json/*.json")]
            if not below:
                raise PlanError(f"{path}: no .json file, nor any in a folder *json")
            found.extend(sorted(below))
        else:
            found.append(path)
    return found


def read(path: Path) -> Dump:
    """Read a dump.

    Raises:
        PlanError: it cannot be read, or is none of ours.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise PlanError(
            f"{path} is no JSON dump of weightsync's flight recorder: {error}"
        ) from error
    if file.weightsync.format != FORMAT:
        raise PlanError(
            f"{path} has format {file.weightsync.format}; this weightsync reads "
            f"{FORMAT}"
        )
    try:
        return _dump(file)
    except LookupError as error:
        raise PlanError(f"{path} refers to a group that it does not list") from error


def _dump(file: _File) -> Dump:
    own = file.weightsync
    groups = {
        each.id: Group(each.name, each.ranks, each.description) for each in own.groups
    }
    calls = [_exchange(each, groups[each.pg_id], own) for each in file.entries]
    calls += [_other(each, groups[each.pg_id], own) for each in own.operations]
    return Dump(
        own.rank,
        own.host,
        own.process,
        own.reason,
        tuple(groups.values()),
        tuple(call for call in calls if call is not None),
    )


def _exchange(entry: _Entry, group: Group, own: _Own) -> Operation | None:
    name = entry.profiling_name.partition(":")[2].partition(" ")[0]
    if name == "coalesced":
        return None  # Its parts are recorded too.
    if name in ("send", "recv"):
        kind, number = Kind(name), entry.with_peer
    else:
        kind, number = Kind.COLLECTIVE, entry.collective_seq_id
    return Operation(
        **_common(entry, group, own),
        kind=kind,
        name=name,
        number=number,
        inputs=_shapes(entry.input_dtypes, entry.input_sizes),
        outputs=_shapes(entry.output_dtypes, entry.output_sizes),
        nbytes=0,
    )


def _other(call: _Other, group: Group, own: _Own) -> Operation:
    kind = Kind.MEMBERSHIP
    if call.name in ("put", "put_many", "signal"):
        kind = Kind.SIGNAL
    elif call.name == "wait_signal":
        kind = Kind.WAIT
    return Operation(
        **_common(call, group, own),
        kind=kind,
        name=call.name,
        number=call.op_id if kind is Kind.MEMBERSHIP else call.with_peer,
        inputs=(),
        outputs=(),
        nbytes=call.bytes,
    )


def _common(call: _Call, group: Group, own: _Own) -> dict[str, Any]:
    frames = [f"{each.filename}:{each.line} in {each.name}" for each in call.frames]
    return {
        "group": group,
        "rank": own.rank,
        "peer": None if call.peer is None else group.ranks[call.peer],
        "finished": call.state == "completed",
        "seconds": (own.time_ns - call.time_created_ns) / 1e9,
        "where": next((each for each in frames if "/torch/" not in each), ""),
    }


def _shapes(
    dtypes: Sequence[str], sizes: Sequence[tuple[int, ...]]
) -> tuple[Shape, ...]:
    return tuple(map(Shape, dtypes, sizes))
