"""What a plan moves, compared with plain indexing."""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.fit import check
from weightsync.plan import (
    Plan,
    Run,
    make_plan,
    sent_bytes,
    slot_layout,
    sum_of_digests,
)
from weightsync.runs import copy_runs
from weightsync.spec import ITEMSIZE, Box, Manifest, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SENTINEL = 0xA5


def whole(
    name: str, *shape: int, dtype: str = "float32", tied: int | None = None
) -> TensorSpec:
    return TensorSpec(name, dtype, shape, Box((0,) * len(shape), shape), tied)


def manifests(*ranks: Sequence[TensorSpec]) -> list[Manifest]:
    return [Manifest.of(tuple(rank)) for rank in ranks]


def checked(
    trainers: Sequence[Manifest], replica: Sequence[Manifest], *, partial: bool = False
) -> Plan:
    check(trainers, replica, replica_name="gen-0", partial=partial)
    return make_plan(trainers, replica)


def all_runs(plan: Plan) -> list[tuple[int, int, Run]]:
    return [(*pair, run) for pair in plan.pairs for run in plan.runs(*pair)]


# Plain indexing, to compare with


def elements(box: Box) -> Iterator[tuple[int, ...]]:
    """Global positions of the elements of a packed box, in order."""
    spans = zip(box.offsets, box.sizes, strict=True)
    return product(*[range(start, start + size) for start, size in spans])


def content(tensor: TensorSpec) -> bytes:
    """Bytes that tell name, place in the global tensor, and byte of the element."""
    itemsize = ITEMSIZE[tensor.dtype]
    data = bytearray()
    for position in elements(tensor.box):
        flat = 0
        for at, size in zip(position, tensor.shape, strict=True):
            flat = flat * size + at
        seed = sum(tensor.name.encode()) + flat * itemsize
        data += bytes([(seed + byte) % 251 for byte in range(itemsize)])
    return bytes(data)


def execute(
    plan: Plan, trainers: Sequence[Manifest], replica: Sequence[Manifest]
) -> tuple[list[bytearray], list[bytearray]]:
    """Run the plan; return the slots, and how often each byte was written."""
    sizes = [slot_layout(manifest).nbytes for manifest in replica]
    slots = [bytearray([SENTINEL]) * size for size in sizes]
    counts = [bytearray(size) for size in sizes]
    sources = [[content(t) for t in manifest.tensors] for manifest in trainers]
    for trainer, generator, run in all_runs(plan):
        data = sources[trainer][run.source]
        for row in range(run.rows):
            start = run.source_offset + row * run.source_stride
            at = run.target_offset + row * run.target_stride
            assert 0 <= start <= start + run.row_bytes <= len(data)
            assert 0 <= at <= at + run.row_bytes <= sizes[generator]
            slots[generator][at : at + run.row_bytes] = data[
                start : start + run.row_bytes
            ]
            for byte in range(at, at + run.row_bytes):
                counts[generator][byte] += 1
    return slots, counts


def wanted(manifest: Manifest) -> tuple[bytearray, bytearray]:
    layout = slot_layout(manifest)
    slot, count = bytearray([SENTINEL]) * layout.nbytes, bytearray(layout.nbytes)
    for tensor, offset in zip(manifest.tensors, layout.offsets, strict=True):
        slot[offset : offset + tensor.nbytes] = content(tensor)
        count[offset : offset + tensor.nbytes] = bytes([1]) * tensor.nbytes
    return slot, count


# Properties


def cuts(draw: st.DrawFn, size: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, size), max_size=2))
    return [0, *sorted(inner), size]


def grid(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that fill a shape; some may be empty."""
    spans = [
        [(a, b - a) for a, b in pairwise(edges)]
        for edges in (cuts(draw, size) for size in shape)
    ]
    return [
        Box(tuple(start for start, _ in cell), tuple(size for _, size in cell))
        for cell in product(*spans)
    ]


@st.composite
def pushes(draw: st.DrawFn) -> tuple[list[Manifest], list[Manifest]]:
    """Tensors cut in one way over trainers, with replicas, in another over a replica.

    A rank holds at most one box of a name. A grid with more cells than ranks takes
    more ranks.
    """
    trainers: list[list[TensorSpec]] = [[] for _ in range(draw(st.integers(1, 3)))]
    replica: list[list[TensorSpec]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
        dtype = draw(st.sampled_from(["int8", "bfloat16", "float32", "complex128"]))
        boxes = grid(draw, shape)
        copies = draw(st.integers(1, 2)) if len(boxes) < 8 else 1
        for side, held in (
            (trainers, boxes * copies),
            (replica, draw(st.sampled_from([grid(draw, shape), boxes]))),
        ):
            side += [[] for _ in range(len(held) - len(side))]
            ranks = draw(st.permutations(range(len(side))))
            for rank, box in zip(ranks, held, strict=False):
                side[rank].append(TensorSpec(f"t{number}", dtype, shape, box))
    return manifests(*trainers), manifests(*replica)


@given(pushes())
@settings(deadline=None)
def test_every_byte_arrives_exactly_once(
    push: tuple[list[Manifest], list[Manifest]],
) -> None:
    trainers, replica = push
    plan = checked(trainers, replica)
    slots, counts = execute(plan, trainers, replica)

    for rank, manifest in enumerate(replica):
        slot, count = wanted(manifest)
        assert slot == slots[rank]
        assert count == counts[rank]


@st.composite
def copies(draw: st.DrawFn) -> tuple[Box, Box, Box]:
    """A part that is not empty, and two boxes around it."""
    dims = draw(st.integers(0, 5))
    numbers = st.lists(st.integers(0, 2), min_size=dims, max_size=dims)
    sizes = [1 + size for size in draw(numbers)]
    part = Box((2,) * dims, tuple(sizes))

    def around() -> Box:
        before, after = draw(numbers), draw(numbers)
        sides = zip(before, sizes, after, strict=True)
        return Box(tuple(2 - b for b in before), tuple(sum(side) for side in sides))

    return part, around(), around()


@given(copies(), st.sampled_from([1, 4]))
@settings(deadline=None)
def test_a_part_of_a_box_is_copied_exactly(
    boxes: tuple[Box, Box, Box], itemsize: int
) -> None:
    part, source, target = boxes
    places = [
        {at: number * itemsize for number, at in enumerate(elements(box))}
        for box in (source, target)
    ]
    expected = sorted(
        (places[0][at] + byte, places[1][at] + byte)
        for at in elements(part)
        for byte in range(itemsize)
    )
    actual = sorted(
        (
            run.source_offset + row * run.source_stride + byte,
            run.target_offset + row * run.target_stride + byte,
        )
        for run in copy_runs(part, source, target, itemsize)
        for row in range(run.rows)
        for byte in range(run.row_bytes)
    )

    assert expected == actual


@given(pushes())
@settings(deadline=None)
def test_no_two_runs_could_be_one(
    push: tuple[list[Manifest], list[Manifest]],
) -> None:
    plan = make_plan(*push)
    flat = [found for found in all_runs(plan) if found[2].rows == 1]
    starts = {
        (trainer, generator, run.source, run.source_offset, run.target_offset)
        for trainer, generator, run in flat
    }

    for trainer, generator, run in flat:
        ends = run.source_offset + run.row_bytes, run.target_offset + run.row_bytes
        assert (trainer, generator, run.source, *ends) not in starts
    for _, _, run in all_runs(plan):
        dense = run.source_stride == run.target_stride == run.row_bytes
        assert dense == (run.rows == 1)


@given(pushes())
@settings(deadline=None)
def test_bytes_of_a_pair_are_those_of_its_runs(
    push: tuple[list[Manifest], list[Manifest]],
) -> None:
    plan = make_plan(*push)

    for pair in plan.pairs:
        assert sum(run.rows * run.row_bytes for run in plan.runs(*pair)) == plan.nbytes(
            *pair
        )
        assert plan.nbytes(*pair) > 0


@given(st.integers(2, 5), st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_holders_of_the_same_share_the_work(holders: int, rows: list[int]) -> None:
    tensors = [whole(f"t{i}", size, 8, dtype="int8") for i, size in enumerate(rows)]
    trainers, replica = manifests(*[tensors] * holders), manifests(tensors)
    plan = checked(trainers, replica)
    loads = [plan.nbytes(rank, 0) for rank in range(holders)]

    assert sum(rows) * 8 == sum(loads)
    assert max(loads) - min(loads) <= 8 * max(rows)


@given(pushes())
@settings(deadline=None)
def test_ranks_that_plan_for_themselves_agree(
    push: tuple[list[Manifest], list[Manifest]],
) -> None:
    trainers, replica = push
    plan = make_plan(trainers, replica)
    rows = [make_plan(*push, trainer=rank) for rank in range(len(trainers))]
    columns = [make_plan(*push, generator=rank) for rank in range(len(replica))]

    for pair in plan.pairs:
        assert plan.runs(*pair) == rows[pair[0]].runs(*pair)
        assert plan.runs(*pair) == columns[pair[1]].runs(*pair)
    assert plan.digest == sum_of_digests([mine.digest for mine in rows])
    assert plan.digest == sum_of_digests([mine.digest for mine in columns])
    sent = [sum(mine.nbytes(*pair) for pair in mine.pairs) for mine in rows]
    assert sent == sent_bytes(trainers, replica)


@given(pushes())
@settings(deadline=None)
def test_a_name_comes_from_one_copy_only(
    push: tuple[list[Manifest], list[Manifest]],
) -> None:
    trainers, replica = push
    plan = make_plan(trainers, replica)
    senders: dict[tuple[str, Box], set[int]] = {}
    for trainer, _, run in all_runs(plan):
        piece = trainers[trainer].tensors[run.source]
        senders.setdefault((piece.name, piece.box), set()).add(trainer)

    assert all(len(ranks) == 1 for ranks in senders.values())


@given(pushes())
@settings(deadline=None)
def test_the_digest_depends_on_nothing_but_the_manifests(
    push: tuple[list[Manifest], list[Manifest]],
) -> None:
    trainers, replica = push
    again = [Manifest.of(manifest.tensors) for manifest in trainers]

    assert make_plan(trainers, replica).digest == make_plan(again, replica).digest
    assert 16 == len(make_plan(trainers, replica).digest)


def test_a_rank_may_hold_only_some_names() -> None:
    experts = [whole(f"experts.{i}", 2, 2) for i in range(12)]
    trainers = manifests(experts[:6], experts[6:])
    replica = manifests(experts[::-1])
    plan = checked(trainers, replica)
    slots, _ = execute(plan, trainers, replica)

    assert wanted(replica[0])[0] == slots[0]
