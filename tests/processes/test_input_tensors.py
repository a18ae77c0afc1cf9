"""What cannot be pushed is refused on every rank before any byte moves."""

from __future__ import annotations

import ctypes
import mmap
import warnings
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import weightsync
from tests.processes.rig import Guarded, open_job

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def sparse() -> torch.Tensor:
    return torch.tensor([0.0, 1.0, 0.0]).to_sparse()


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(1).cpu(), torch.ones(2).cpu()])


def sub_byte() -> torch.Tensor:
    return torch.empty(3, dtype=torch.uint4)


DTYPE = weightsync.DtypeError
UNSUPPORTED = weightsync.UnsupportedError
PLAN = weightsync.PlanError

BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "None": (lambda: None, DTYPE, "NoneType"),
    "bytes": (lambda: b"abc", DTYPE, "bytes"),
    "a number": (lambda: 3.5, DTYPE, "float"),
    "a list": (lambda: [torch.ones(3)], DTYPE, "list"),
    "another dtype": (lambda: torch.ones(3, dtype=torch.float64), DTYPE, "float64"),
    "below a byte": (sub_byte, DTYPE, "uint4"),
    "meta": (lambda: torch.ones(3, device="meta"), UNSUPPORTED, "meta"),
    "sparse": (sparse, UNSUPPORTED, "sparse"),
    "quantized": (quantized, UNSUPPORTED, "qint8"),
    "nested": (nested, UNSUPPORTED, "nested"),
    "freed": (freed, UNSUPPORTED, "freed"),
    "lazy": (torch.nn.UninitializedParameter, UNSUPPORTED, "not initialized"),
    "longer": (lambda: torch.ones(4), PLAN, "(4,)"),
    "of more dimensions": (lambda: torch.ones(3, 1), PLAN, "(3, 1)"),
    "a scalar": (lambda: torch.tensor(1.0), PLAN, "()"),
    "outside": (
        lambda: weightsync.Shard(torch.ones(2), global_shape=(3,), offsets=(2,)),
        PLAN,
        "not inside",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("culprits", [(1,), (0, 1)], ids=["one rank", "both ranks"])
async def test_a_bad_entry_is_refused_on_every_rank(
    case: str, culprits: tuple[int, ...]
) -> None:
    make, error, words = BAD[case]
    good = {"good": torch.ones(3), "bad": torch.ones(3)}
    given = [good | {"bad": make()} if r in culprits else good for r in range(2)]
    places = {name: Guarded(3) for name in good}
    async with open_job(2) as job:
        tensors = {name: place.tensor for name, place in places.items()}
        generator = await job.join_one(tensors)
        outcomes = await job.outcomes(*given)
        again = await job.outcomes(*given)
        untouched = all(place.untouched for place in places.values())
        version = (generator.version, generator.pending)
        (update,) = await job.deliver(generator, good)

    messages = [str(outcome) for outcome in outcomes + again]
    assert [error] * 4 == [type(outcome) for outcome in outcomes + again]
    assert all("'bad'" in message and words in message for message in messages)
    assert 1 == len(set(messages))
    assert (True, (None, None)) == (untouched, version)
    assert 1 == update.version
    assert all(place.tensor.tolist() == [1.0] * 3 for place in places.values())


async def test_an_error_names_the_rank_that_only_one_rank_can_see() -> None:
    async with open_job(2) as job:
        await job.join_one({"w": torch.zeros(3)})
        outcomes = await job.outcomes({"w": torch.ones(3)}, {"w": None})
        shapes = await job.outcomes({"w": torch.ones(3)}, {"w": torch.ones(5)})

    assert all("trainer rank 1" in str(error) for error in outcomes)
    assert all("(3,) on trainer rank 0" in str(error) for error in shapes)
    assert all("(5,) on trainer rank 1" in str(error) for error in shapes)


@pytest.mark.parametrize(
    "given",
    [
        {"w": torch.ones(3), 5: torch.ones(3)},
        [torch.ones(3)],
        torch.ones(3),
        None,
    ],
    ids=["a number as name", "a list", "a tensor", "None"],
)
async def test_what_is_no_state_dict_is_refused_on_every_rank(given: Any) -> None:
    weight = torch.zeros(3)
    async with open_job(2) as job:
        generator = await job.join_one({"w": weight})
        outcomes = await job.outcomes({"w": torch.ones(3)}, given)
        (update,) = await job.deliver(generator, {"w": torch.ones(3)})
    with pytest.raises(weightsync.PlanError):
        weightsync.Generator("tcp://127.0.0.1:1", given)

    assert [weightsync.PlanError] * 2 == [type(error) for error in outcomes]
    assert all("trainer rank 1" in str(error) for error in outcomes)
    assert (1, [1.0] * 3) == (update.version, weight.tolist())


async def test_what_was_good_before_is_checked_again() -> None:
    weight, source = torch.zeros(3), torch.ones(3)
    async with open_job() as job:
        generator = await job.join_one({"w": weight})
        await job.deliver(generator, {"w": source})
        source.untyped_storage().resize_(0)
        (outcome,) = await job.outcomes({"w": source})
        source.untyped_storage().resize_(12)
        source.fill_(2)
        (update,) = await job.deliver(generator, {"w": source})

    assert isinstance(outcome, weightsync.UnsupportedError)
    assert (2, [2.0] * 3) == (update.version, weight.tolist())


UNFIT = {
    "expanded": (lambda: torch.zeros(3).expand(2, 3), PLAN),
    "conjugated": (lambda: torch.zeros(2, dtype=torch.complex64).conj(), UNSUPPORTED),
    "meta": (lambda: torch.zeros(3, device="meta"), UNSUPPORTED),
    "sparse": (sparse, UNSUPPORTED),
    "quantized": (quantized, UNSUPPORTED),
    "freed": (freed, UNSUPPORTED),
    "None": (lambda: None, DTYPE),
    "below a byte": (sub_byte, DTYPE),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_be_received_into_is_refused_when_it_is_registered(
    case: str,
) -> None:
    make, error = UNFIT[case]
    with pytest.raises(error, match="'bad'"):
        weightsync.Generator(
            "tcp://127.0.0.1:1", {"good": torch.ones(3), "bad": make()}
        )


def test_destinations_that_overlap_in_part_are_refused() -> None:
    storage = torch.zeros(10)
    with pytest.raises(weightsync.PlanError, match=r"'a'.*'b'"):
        weightsync.Generator("tcp://127.0.0.1:1", {"a": storage[:6], "b": storage[5:]})


def read_only(nbytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, nbytes, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of just this
        return torch.frombuffer(memory, dtype=torch.float32)


def test_read_only_memory_is_refused_when_it_is_registered() -> None:
    weights = {"good": torch.ones(3), "bad": read_only(8192)}
    with pytest.raises(weightsync.PlanError, match=r"'bad'.*cannot be written"):
        weightsync.Generator("tcp://127.0.0.1:1", weights)


async def test_memory_that_becomes_read_only_is_an_error_on_both_sides() -> None:
    memory = mmap.mmap(-1, 1 << 20)
    weight = torch.frombuffer(memory, dtype=torch.float32)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    where = ctypes.c_void_p(weight.data_ptr())
    async with open_job() as job:
        generator = await job.join_one({"w": weight})
        pushed = {"w": torch.ones_like(weight)}
        await job.deliver(generator, pushed)
        assert 0 == protect(where, ctypes.c_size_t(1 << 20), mmap.PROT_READ)
        await job.push(pushed)
        with pytest.raises(weightsync.PlanError, match=r"'w'.*cannot be written"):
            await generator.receive(timeout=5)
        with anyio.fail_after(5):
            while job.trainers[0].replicas:  # until the leader has heard of it
                await anyio.sleep(0.001)
        with pytest.raises(weightsync.PeerError, match="no replica has joined"):
            await job.push(pushed)
        assert 0 == protect(
            where, ctypes.c_size_t(1 << 20), mmap.PROT_READ | mmap.PROT_WRITE
        )


@pytest.mark.parametrize("columns", [1, 2])
async def test_a_destination_that_was_freed_fails_by_name_and_not_by_a_signal(
    columns: int,
) -> None:
    strided = torch.zeros(1 << 20, columns)[:, 0]
    weights = {"kept": torch.zeros(3), "w": strided}
    async with open_job() as job:
        generator = await job.join_one(weights)
        pushed = {"kept": torch.ones(3), "w": torch.ones(1 << 20)}
        await job.deliver(generator, pushed)
        weights["w"].untyped_storage().resize_(0)
        await job.push(pushed)
        with pytest.raises(weightsync.WeightSyncError, match="'w'"):
            await generator.receive(timeout=5)
