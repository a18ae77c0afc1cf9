"""What is pushed arrives byte by byte, however it lies in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.processes.driven import in_shared_memory
from tests.processes.rig import Guarded, Source, open_job, raw

pytestmark = pytest.mark.anyio

MIB = 1 << 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def shared_mib() -> float:
    """Shared memory that this process maps and has touched."""
    rollup = Path("/proc/self/status").read_text()
    (line,) = [line for line in rollup.splitlines() if line.startswith("RssShmem")]
    return int(line.split()[1]) / 1024


async def pushed(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Push into guarded destinations; also checks the guards and the source."""
    source = Source(state_dict)
    places = {
        name: Guarded(*tensor.shape, dtype=tensor.dtype)
        for name, tensor in state_dict.items()
    }
    async with open_job() as job:
        tensors = {name: place.tensor for name, place in places.items()}
        generator = await job.join_one(tensors)
        await job.push(state_dict)
        await generator.receive(timeout=10)

    assert source.untouched
    assert all(place.intact for place in places.values())
    return tensors


STRIDED = {
    "transposed": (
        torch.arange(12.0).reshape(3, 4).t(),
        [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]],
    ),
    "every second row, last columns": (
        torch.arange(40.0).reshape(8, 5)[::2, 2:],
        [[2, 3, 4], [12, 13, 14], [22, 23, 24], [32, 33, 34]],
    ),
    "expanded": (torch.tensor([1.0, 2.0, 3.0]).expand(4, 3), [[1, 2, 3]] * 4),
    "from the middle": (torch.arange(10)[3:7], [3, 4, 5, 6]),
    "of every third element": (torch.arange(10)[::3], [0, 3, 6, 9]),
}


@pytest.mark.parametrize("case", STRIDED)
async def test_a_strided_source_arrives_in_its_logical_order(case: str) -> None:
    source, expected = STRIDED[case]
    found = await pushed({"before": torch.ones(3), "w": source, "after": torch.ones(3)})

    assert expected == found["w"].tolist()
    assert [1.0] * 3 == found["before"].tolist() == found["after"].tolist()


async def test_a_channels_last_source_arrives_with_its_logical_values() -> None:
    weight = torch.arange(24.0).reshape(2, 3, 2, 2)
    found = await pushed({"w": weight.to(memory_format=torch.channels_last)})

    assert weight.tolist() == found["w"].tolist()


async def test_lazily_conjugated_and_negated_sources_arrive_resolved() -> None:
    plain = torch.tensor([1 + 2j, 3 - 4j])
    found = await pushed({"conj": plain.conj(), "imag": plain.conj().imag})

    assert [1 - 2j, 3 + 4j] == found["conj"].tolist()
    assert [-2.0, 4.0] == found["imag"].tolist()


async def test_a_source_that_becomes_lazy_is_not_taken_for_the_one_before() -> None:
    plain = torch.tensor([1 + 2j, 3 - 4j])
    weight = torch.zeros(2, dtype=torch.complex64)
    found = []
    async with open_job() as job:
        generator = await job.join_one({"w": weight})
        for source in (plain, plain.conj(), plain, plain.conj().conj()):
            await job.push({"w": source})
            await generator.receive(timeout=10)
            found.append(weight.tolist())

    lazily = [1 - 2j, 3 + 4j]
    assert [plain.tolist(), lazily, plain.tolist(), plain.tolist()] == found


async def test_a_source_whose_strides_change_is_captured_again() -> None:
    square = torch.arange(9.0).reshape(3, 3)
    weight = torch.zeros(3, 3)
    found = []
    async with open_job() as job:
        generator = await job.join_one({"w": weight})
        for source in (square, square.t(), square):
            await job.push({"w": source})
            await generator.receive(timeout=10)
            found.append(weight.tolist())

    assert [square.tolist(), square.t().tolist(), square.tolist()] == found


PLACES = {
    "transposed": torch.zeros(4, 3).t(),
    "spread": torch.zeros(6, 8)[::2, ::2],
    "from the middle": torch.zeros(20)[4:16].view(3, 4),
}


@pytest.mark.parametrize("case", PLACES)
async def test_a_strided_destination_is_filled_and_nothing_beside_it(case: str) -> None:
    weight = PLACES[case]
    everything = torch.as_strided(
        weight, (weight.untyped_storage().nbytes() // 4,), (1,), 0
    )
    inside = torch.zeros(everything.shape, dtype=torch.bool)
    inside_it = torch.as_strided(
        inside, weight.shape, weight.stride(), weight.storage_offset()
    )
    inside_it.fill_(True)
    everything.fill_(-777)
    source = torch.arange(12.0).reshape(3, 4)
    async with open_job() as job:
        generator = await job.join_one({"w": weight})
        await job.push({"w": source})
        await generator.receive(timeout=10)

    assert source.tolist() == weight.tolist()
    assert (everything[~inside] == -777).all()


@pytest.mark.parametrize(
    ("dtype", "carrier", "patterns"),
    [
        (torch.bool, torch.uint8, [0, 1, 2, 255]),
        (torch.bfloat16, torch.int16, [-32768, 1, 0x7FC1, 0x7F81]),
        (torch.float16, torch.int16, [-32768, 1, 0x7E01, 0x7C01]),
        (torch.float32, torch.int32, [-(2**31), 1, 0x7FC00001, 0x7F800001]),
        (torch.complex32, torch.int32, [0x7E017C01, 1, 0x7C01, -1]),
        (torch.complex64, torch.int64, [0x7FC000017F800001, 1, 0x7F800001, -1]),
    ],
    ids=str,
)
async def test_a_strided_destination_gets_the_very_bits(
    dtype: torch.dtype, carrier: torch.dtype, patterns: list[int]
) -> None:
    source = torch.tensor(patterns, dtype=carrier).view(dtype).reshape(2, 2)
    weight = torch.zeros(2, 4, dtype=carrier).view(dtype)[:, ::2]
    async with open_job() as job:
        generator = await job.join_one({"w": weight})
        await job.push({"w": source})
        await generator.receive(timeout=10)

    assert patterns == weight.view(carrier).reshape(-1).tolist()


async def test_a_small_view_of_a_large_storage_costs_what_it_shows() -> None:
    # Untouched memory: the storage is large, the process is not.
    source = torch.empty(256 * MIB)[-16:].view(4, 4)
    weight = torch.empty(256 * MIB)[-16:].view(4, 4)
    source.copy_(torch.arange(16.0).view(4, 4))
    before = shared_mib()
    async with open_job() as job:
        generator = await job.join_one({"w": weight})
        await job.push({"w": source})
        await generator.receive(timeout=10)
        grown = shared_mib() - before

    assert list(range(16)) == weight.reshape(-1).tolist()
    assert grown <= 1


async def _large(mib: int) -> tuple[bool, int]:
    source = torch.arange(mib * MIB // 4, dtype=torch.int32)
    weight = torch.full_like(source, -777)
    async with open_job(trainers=2) as job:
        generator = await job.join_one({"w": weight})
        reports = await job.push({"w": source}, timeout=50)
        await generator.receive(timeout=50)
    return torch.equal(source, weight), reports[0].nbytes


async def test_one_tensor_larger_than_every_buffer_arrives() -> None:
    assert (True, 96 * MIB) == await _large(96)


@pytest.mark.slow
async def test_one_tensor_of_half_a_gibibyte_arrives() -> None:
    assert (True, 512 * MIB) == await _large(512)


async def test_a_push_leaves_nothing_in_shared_memory() -> None:
    before = in_shared_memory()
    found = await pushed({"w": torch.arange(1000.0)})

    assert raw(torch.arange(1000.0)) == raw(found["w"])
    assert set() == in_shared_memory() - before
