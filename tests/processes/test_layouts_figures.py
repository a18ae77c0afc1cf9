"""Sharded trainers to a whole generator: who sends how much, memory, no collective."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weightsync.blocking
from tests.processes.driven import MIB
from tests.processes.meshes import Team, device_type, fsdp, local_of
from tests.processes.rig import SECONDS
from weightsync.layout import capture, register
from weightsync.plan import sent_bytes

if TYPE_CHECKING:
    from tests.processes.harness import Control, Processes
    from tests.processes.meshes import Rank
    from weightsync.spec import Manifest

TENSORS = 8
COLUMNS = 4096


class Memory(NamedTuple):
    """What the kernel says of this process, in MiB; the peak since it was reset."""

    resident: float
    peak: float
    shared: float

    @classmethod
    def now(cls) -> Memory:
        """Read it."""
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        names = ("VmRSS", "VmHWM", "RssShmem")
        return cls(*[int(fields[name].split()[0]) / 1024 for name in names])

    @classmethod
    def reset(cls) -> Memory:
        """Forget the peak; return what is occupied now."""
        Path("/proc/self/clear_refs").write_text("5")
        return cls.now()


def windows(pid: int) -> dict[int, int]:
    """Bytes of each anonymous file of shared memory that a process has open."""
    found = {}
    folder = Path(f"/proc/{pid}/fd")
    for name in os.listdir(folder):
        path = folder / name
        if str(path.readlink()).startswith("/memfd:"):
            state = path.stat()
            found[state.st_ino] = state.st_blocks * 512
    return found


def model_of(rows: int) -> nn.Sequential:
    """Layers without memory: each weight has so many rows."""
    with torch.device("meta"):
        return nn.Sequential(
            *[nn.Linear(COLUMNS, rows, bias=False) for _ in range(TENSORS)]
        )


def row_of(number: int, row: int) -> torch.Tensor:
    """What a row of a layer holds: numbers that tell layers and rows apart."""
    return torch.arange(COLUMNS, dtype=torch.float32) + (row % 1024 * COLUMNS + number)


def sequence_numbers() -> list[int]:
    """How many collectives each process group of this process has seen."""
    groups = dist.distributed_c10d._world.pg_map
    return [group._get_sequence_number_for_group() for group in groups]


class Sent(NamedTuple):
    """What a trainer rank tells after its push."""

    manifest: Manifest
    before: Memory
    after: Memory
    collectives: tuple[list[int], list[int]]
    nbytes: list[int]


def _trainer(rank: Rank, rows: int) -> Sent:
    model = model_of(rows)
    mesh = rank.mesh(rank.world)
    for layer in model:
        fsdp(layer, mesh)
    fsdp(model, mesh).to_empty(device=device_type())
    state_dict = model.state_dict()
    half = rows // rank.world
    for number, tensor in enumerate(state_dict.values()):
        for index, row in enumerate(local_of(tensor), half * rank.rank):
            row.copy_(row_of(number, index))
    dist.barrier()
    numbers, before = sequence_numbers(), Memory.reset()
    rank.control.say("built")
    rank.transport.wait_for_replicas(1)
    report = rank.transport.push(state_dict)
    after = Memory.now()
    collectives = numbers, sequence_numbers()
    # Now whoever tries a collective fails.
    dist.destroy_process_group()
    again = rank.transport.push(state_dict)
    rank.control.hear()
    manifest = capture(state_dict).manifest
    return Sent(manifest, before, after, collectives, [report.nbytes, again.nbytes])


class Got(NamedTuple):
    """What the generator tells after it has received."""

    manifest: Manifest
    before: Memory
    after: Memory
    wrong: list[list[int]]


def _generator(control: Control, address: str, rows: int) -> Got:
    weights = {
        f"{number}.weight": torch.full((rows, COLUMNS), -777, dtype=torch.float32)
        for number in range(TENSORS)
    }
    wrong = []
    before = Memory.reset()
    with weightsync.blocking.Generator(
        address, weights, replica="whole", timeout=SECONDS
    ) as transport:
        transport.receive()
        after = Memory.now()
        wrong.append(differing(weights))
        control.say("received")
        control.hear()
        transport.receive()
        wrong.append(differing(weights))
    return Got(register(weights).manifest, before, after, wrong)


def differing(weights: dict[str, torch.Tensor]) -> list[int]:
    """Layers that are not what was pushed; what is right is forgotten."""
    wrong = []
    for number, weight in enumerate(weights.values()):
        rows = [torch.equal(row, row_of(number, i)) for i, row in enumerate(weight)]
        if not all(rows):
            wrong.append(number)
        weight.fill_(-777)
    return wrong


@pytest.mark.parametrize(
    "mib",
    [
        128,
        pytest.param(512, marks=pytest.mark.slow),
        pytest.param(1024, marks=[pytest.mark.slow, pytest.mark.timeout(150)]),
    ],
)
def test_two_sharded_trainers_send_half_each_and_no_copy_of_the_model(
    processes: Processes, address: str, mib: int
) -> None:
    rows = mib * MIB // (4 * COLUMNS * TENSORS)
    team = Team(processes, address, 2, _trainer, rows)
    team.hear(50)
    generator = processes.start(_generator, address, rows)
    generator.hear(50)
    children = [*team.ranks, generator]
    shared: dict[int, int] = {}
    for child in children:
        shared |= windows(child.pid)
    generator.say("go on")
    got: Got = generator.result(50)
    team.say("end")
    sent: list[Sent] = team.results()

    half = mib / 2
    assert [[], []] == got.wrong
    assert [[mib * MIB] * 2] * 2 == [rank.nbytes for rank in sent]
    planned = sent_bytes([rank.manifest for rank in sent], [got.manifest])
    touched = [rank.after.shared - rank.before.shared for rank in sent]
    assert [half, half] == pytest.approx([nbytes / MIB for nbytes in planned], 0.02)
    assert [half, half] == pytest.approx(touched, 0.02)
    assert all(max(rank.collectives[0]) > 0 for rank in sent)
    assert [True] * 2 == [rank.collectives[0] == rank.collectives[1] for rank in sent]
    assert max(rank.after.peak - rank.before.resident for rank in sent) <= half + 64
    assert got.after.peak - got.before.resident <= mib + 64
    assert mib * MIB <= sum(shared.values()) <= 2 * mib * MIB
