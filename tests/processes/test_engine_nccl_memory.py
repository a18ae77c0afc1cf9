"""A pool in which a later link gets no windows or no memory, and the first one has.

Trainer ranks that have a link form the next one with the same memory, and take more
where its window has segments. They put out of chunks, or straight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import pytest

from tests.processes.driven import MIB, SENTINEL, Held, Outcome, call
from tests.processes.faulty import TRAINERS
from weightsync import testing
from weightsync.budget import MANY

if TYPE_CHECKING:
    from tests.processes.faulty import Pool

pytestmark = [
    testing.requires_emulator(),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("every_nccl"),
]

RANKS: Final = tuple(f"trainer-{rank}" for rank in range(TRAINERS))
SEGMENT: Final = 4096
"""Bytes: so few that the headers are a segment, and each of two slots is one."""

SECONDS: Final = 8.0
"""So long at most a replica waits to hear that it has no link."""


@dataclass(frozen=True)
class Kind:
    """How trainer ranks put, and whether the window of the later link has segments."""

    straight: bool
    segments: bool

    def __str__(self) -> str:
        first = "straight" if self.straight else "staged"
        return f"{first} in segments" if self.segments else first

    @property
    def windows(self) -> int:
        """How often each rank registers memory when that link is formed."""
        return (3 if self.segments else 1) + (1 if self.straight else 0)

    def begin(self, pool: Pool) -> None:
        """There is one replica, which has version 1."""
        pool.straight = self.straight
        pool.train()
        pool.join("gen-0")
        pool.deliver(1, "gen-0")

    def start(self, pool: Pool, faults: str = "") -> Outcome:
        """Start another one, and let it wait; the first one has version 2 then."""
        pool.segment = SEGMENT if self.segments else None
        mode: Literal["staged", "swap"] = "swap" if self.segments else "staged"
        broken = pool.start("gen-1", faults, mode)
        opened = broken.hear()
        outcome: Outcome = call(broken, "receive", timeout=15)
        held = call(broken, "held").value
        pool.deliver(2, "gen-0")

        assert "open" == opened
        assert Held(None, SENTINEL) == held
        return outcome


STAGED, IN_SEGMENTS = Kind(False, False), Kind(False, True)
STRAIGHT, STRAIGHT_IN_SEGMENTS = Kind(True, False), Kind(True, True)
KINDS: Final = [STAGED, IN_SEGMENTS, STRAIGHT, STRAIGHT_IN_SEGMENTS]


def removed(outcome: Outcome, *words: str) -> list[str]:
    """What is missing in how a replica ended that has no link, in time."""
    wanted = ["PeerError", "removed from the pool", *words]
    told = f"{outcome.kind}: {outcome.value}"
    found = [word for word in wanted if word not in told]
    return found if outcome.seconds < SECONDS else [*found, f"{outcome.seconds} s"]


NULL: Final = [
    pytest.param(kind, number, id=f"{kind}: window {number}")
    for kind in KINDS
    for number in range(1, kind.windows + 1)
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), NULL)
def test_a_trainer_rank_that_gets_no_window_for_a_later_link_loses_that_one(
    kind: Kind, number: int, pool: Pool
) -> None:
    kind.begin(pool)
    pool.inject("trainer-1", f"window_register@n={number}:null", now=True)
    outcome = kind.start(pool)
    pool.come_back("gen-1", 3)

    assert [] == removed(outcome, "trainer rank 1", "makes no windows")
    assert 1 == pool.faults("trainer-1")
    assert [] == pool.hangs
    assert pool.close() < 10


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, id=str(kind), marks=() if kind == STAGED else pytest.mark.slow
        )
        for kind in KINDS
    ],
)
def test_a_link_for_which_nccl_makes_no_windows_concerns_no_other(
    kind: Kind, pool: Pool
) -> None:
    # As NCCL does it, which asks what all GPUs of a communicator can.
    kind.begin(pool)
    for name in RANKS:
        pool.inject(name, "window_register:null", now=True)
    outcome = kind.start(pool, "window_register@n=1:null")
    pool.come_back("gen-1", 3)

    assert [] == removed(outcome, "makes no windows for this process group")
    assert [1] * 3 == [pool.faults(name) for name in (*RANKS, "gen-1")]
    assert [] == pool.hangs
    assert pool.close() < 10


@dataclass(frozen=True)
class Full:
    """So many bytes are left on the GPU of trainer rank 1, which says what it lacks."""

    kind: Kind
    left: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {self.left // MIB} MiB left"


LACKS: Final = "OutOfMemoryError: NCCL has no "
FULL: Final = [
    Full(STAGED, 0, ("ncclMemAlloc",)),
    Full(IN_SEGMENTS, MANY - MIB, (LACKS, f"{MANY} bytes")),
    Full(IN_SEGMENTS, MANY + 10 * MIB, (LACKS,)),
    Full(STRAIGHT, 0, ("ncclMemAlloc",)),
    Full(STRAIGHT_IN_SEGMENTS, 10 * MIB, (LACKS,)),
]


@pytest.mark.parametrize(
    "full",
    [
        pytest.param(
            full, id=str(full), marks=() if full == FULL[2] else pytest.mark.slow
        )
        for full in FULL
    ],
)
def test_a_trainer_rank_whose_gpu_is_full_forms_the_link_when_there_is_memory_again(
    full: Full, pool: Pool
) -> None:
    full.kind.begin(pool)
    taken = call(pool.trainers[1], "leave_free", nbytes=full.left)
    outcome = full.kind.start(pool)
    given = call(pool.trainers[1], "leave_free", nbytes=None)
    pool.come_back("gen-1", 3)

    assert ["ok", "ok"] == [taken.kind, given.kind]
    assert [] == removed(outcome, "trainer rank 1", *full.words)
    assert [] == pool.hangs
    assert pool.close() < 10


@dataclass(frozen=True)
class Lack:
    """One allocation that fails while a link forms, of those that it makes."""

    kind: Kind
    who: str
    fault: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.who}: {self.fault}"


ALLOCATIONS: Final = {
    "trainer-1": {
        STAGED: (1,),
        IN_SEGMENTS: (1, 2, 3),
        STRAIGHT: (1,),
        STRAIGHT_IN_SEGMENTS: (1, 2),
    },
    "gen-1": {
        STAGED: (2,),
        IN_SEGMENTS: (4,),
        STRAIGHT: (2, 3),
        STRAIGHT_IN_SEGMENTS: (4, 5),
    },
}
"""Of NCCL: chunks, a filler, and what the ranks meet with; the generator's come after
those of its window, which it makes where it begins."""

MAPPING: Final = ("cuMemRetainAllocationHandle", "cuMemAddressReserve", "cuMemMap")
MAPPED: Final = {"trainer-1": (IN_SEGMENTS, STRAIGHT_IN_SEGMENTS)}
"""Whose filler is mapped a second time."""

LACKING: Final = [
    *(
        Lack(kind, who, f"mem_alloc@n={number}:fail=1")
        for who, kinds in ALLOCATIONS.items()
        for kind, numbers in kinds.items()
        for number in numbers
    ),
    *(
        Lack(kind, who, f"{name}@n=1:fail=2")
        for who, kinds in MAPPED.items()
        for kind in kinds
        for name in (*MAPPING, "cuMemSetAccess")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("lack", LACKING, ids=str)
def test_memory_that_lacks_for_a_later_link_concerns_no_other(
    lack: Lack, pool: Pool
) -> None:
    lack.kind.begin(pool)
    if lack.who != "gen-1":
        pool.inject(lack.who, lack.fault, now=True)
    outcome = lack.kind.start(pool, lack.fault if lack.who == "gen-1" else "")
    pool.come_back("gen-1", 3)
    who = ["trainer rank 1"] if lack.who == "trainer-1" else ["replica 'gen-1'"]
    name = lack.fault.partition("@")[0].replace("mem_alloc", "ncclMemAlloc")

    assert [] == removed(outcome, *who, name)
    assert 1 == pool.faults(lack.who)
    assert [] == pool.hangs
    assert pool.close() < 10
