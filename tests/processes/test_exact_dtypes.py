"""Every dtype arrives bit by bit, at every alignment, and no other dtype does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weightsync
from tests.processes.rig import MODES, Guarded, Mode, Source, bits, open_job, raw
from weightsync.spec import ITEMSIZE

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def odd_sizes() -> dict[str, Tensor]:
    """Sizes that leave what follows misaligned if packed, and bits that copies lose."""
    return {
        "fp16": torch.tensor([1.5, -0.0, 65504.0], dtype=torch.float16),
        "fp32": torch.tensor([1e-40]),
        "bool": torch.tensor([True]),
        "fp64": torch.tensor([-0.0], dtype=torch.float64),
        "bf16": bits([-32768, 1, 0x7FC1, 0x7F80], torch.bfloat16, torch.int16),
        "e4m3": bits([0x7F, 0x80, 1], torch.float8_e4m3fn, torch.uint8),
        "e5m2": bits([0x7D, 0x80, 1], torch.float8_e5m2, torch.uint8),
        "u16": torch.tensor([65535], dtype=torch.uint16),
        "i64": torch.tensor([2**63 - 1]),
        "c64": bits([0x7FC012343F800000], torch.complex64, torch.int64),
        "i8": torch.tensor([-128], dtype=torch.int8),
    }


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("mode", MODES)
async def test_all_dtypes_in_one_push_arrive_with_identical_bytes(
    mode: Mode, trainers: int
) -> None:
    source = odd_sizes()
    before = Source(source)
    places = {n: Guarded(*t.shape, dtype=t.dtype) for n, t in source.items()}
    tensors = {name: place.tensor for name, place in places.items()}
    if mode != "staged":  # These exchange whole storages.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    async with open_job(trainers) as job:
        generator = await job.join_one(tensors, mode=mode)
        (update,) = await job.deliver(generator, source)
        found = {name: raw(tensor) for name, tensor in tensors.items()}

    assert {name: raw(tensor) for name, tensor in source.items()} == found
    assert sum(len(data) for data in found.values()) == update.nbytes
    assert all(place.intact for place in places.values())
    assert before.untouched


async def test_each_dtype_that_can_be_moved_is_moved_bit_by_bit() -> None:
    patterns = torch.arange(256, dtype=torch.uint8).repeat(16)
    source = {
        name: patterns.view(getattr(torch, name))
        for name in ITEMSIZE
        if hasattr(torch, name)
    }
    tensors = {n: torch.zeros_like(patterns).view(t.dtype) for n, t in source.items()}
    async with open_job(2) as job:
        generator = await job.join_one(tensors)
        await job.deliver(generator, source)

    expected = patterns.tolist()
    assert dict.fromkeys(source, expected) == {n: raw(t) for n, t in tensors.items()}


MISMATCHES = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float8_e4m3fn, torch.float8_e5m2),
    (torch.int64, torch.uint64),
]


@pytest.mark.parametrize(("pushed", "registered"), MISMATCHES, ids=str)
async def test_another_dtype_is_an_error_that_names_key_and_both_dtypes(
    pushed: torch.dtype, registered: torch.dtype
) -> None:
    good, bad = Guarded(3), Guarded(3, dtype=registered)
    async with open_job(2) as job:
        generator = await job.join_one({"good": good.tensor, "bad": bad.tensor})
        outcomes = await job.outcomes(
            {"good": torch.ones(3), "bad": torch.ones(3).to(pushed)}
        )
        untouched = good.untouched and bad.untouched
        versions = (generator.version, generator.pending)
        last = {"good": torch.ones(3), "bad": torch.ones(3).to(registered)}
        await job.deliver(generator, last)

    names = ["'bad'", str(pushed)[6:], str(registered)[6:]]
    assert [weightsync.DtypeError] * 2 == [type(error) for error in outcomes]
    assert all(isinstance(error, TypeError) for error in outcomes)
    assert all(name in str(error) for error in outcomes for name in names)
    assert (True, (None, None)) == (untouched, versions)
    assert [1.0, 1.0, 1.0] == bad.tensor.to(torch.float32).tolist()
