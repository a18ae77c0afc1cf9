"""From any layout to any layout: random meshes, placements and rules, byte by byte.

Everything but the transport itself: trainers capture, the push is checked and planned,
the runs are carried out by plain slicing, and generators get what plain indexing of the
global tensors gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.applying import raw
from weightsync.fit import check
from weightsync.layout import Captured, Registered, Shard, captured, register
from weightsync.locate import Entry
from weightsync.names import Rule, Slice, fuse, optional, rename, stack, take
from weightsync.pieces import pieces_of
from weightsync.placements import (
    Replicate,
    ShardPlacement,
    copy_number,
    local_boxes,
    placed,
    strided_shard,
)
from weightsync.plan import make_plan, slot_layout
from weightsync.runs import packed_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor.placement_types import Placement

    from weightsync.plan import Plan
    from weightsync.spec import Box

SENTINEL = 0xA5
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex128]


def counted(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor whose bytes tell where they belong."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = (torch.arange(count, dtype=torch.int64) * 31 + seed * 17) % 251
    return data.to(torch.uint8).view(dtype).reshape(tuple(shape))


def sentinel(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.full((count,), SENTINEL, dtype=torch.uint8)
    return data.view(dtype).reshape(tuple(shape))


def indices(box: Box) -> tuple[slice, ...]:
    spans = zip(box.offsets, box.sizes, strict=True)
    return tuple([slice(start, start + size) for start, size in spans])


# Trainers: placements on a mesh, plain tensors, rules


def placements(
    draw: st.DrawFn, shape: tuple[int, ...], mesh: tuple[int, ...]
) -> tuple[Placement, ...]:
    choices: list[Placement] = [Replicate()]
    for dim in range(len(shape)):
        choices += [ShardPlacement(dim), ShardPlacement(dim)]
        choices += [strided_shard(dim, split_factor=draw(st.integers(2, 3)))]
    return tuple([draw(st.sampled_from(choices)) for _ in mesh])


def hold(
    name: str,
    tensor: torch.Tensor,
    mesh: tuple[int, ...],
    cuts: tuple[Placement, ...],
) -> list[Entry]:
    """The local tensor of each rank, as DTensor would have it."""
    shape = tuple(tensor.shape)
    entries: list[Entry] = []
    for coordinate in product(*[range(size) for size in mesh]):
        held = local_boxes(shape, mesh, coordinate, cuts)
        ends = [[b.start[d] + b.box.sizes[d] for b in held] for d in range(len(shape))]
        local = sentinel([max(end) for end in ends], tensor.dtype)
        for box, start in held:
            at = zip(start, box.sizes, strict=True)
            local[tuple([slice(a, a + n) for a, n in at])] = tensor[indices(box)]
        copy = copy_number(mesh, coordinate, cuts)
        entries.append(Entry(name, local, shape, held, copy))
    return entries


# Generators: what each rank registers, and what it must become


@dataclass
class Wanted:
    """One entry of a generator rank: what is registered, and its value afterwards."""

    name: str
    entry: object
    memory: torch.Tensor
    value: torch.Tensor
    rules: tuple[Rule, ...] = ()


def destination(
    draw: st.DrawFn, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Contiguous, or inside of a larger buffer, or with its dims in another order."""
    kind = draw(st.sampled_from(["contiguous", "inside", "turned"]))
    if kind == "inside":
        buffer = sentinel([size + 2 for size in shape], dtype)
        return buffer[tuple([slice(1, 1 + size) for size in shape])]
    if kind == "turned" and shape:
        turned = sentinel(list(reversed(shape)), dtype)
        return turned.permute(*reversed(range(len(shape))))
    return sentinel(shape, dtype)


def cut_by_hand(
    name: str, tensor: torch.Tensor, box: Box, memory: torch.Tensor
) -> Wanted:
    value = tensor[indices(box)]
    entry = Shard(memory, global_shape=tensor.shape, offsets=box.offsets)
    return Wanted(name, entry, memory, value)


@dataclass
class Model:
    """Pushed tensors by name, some of which are parts of one of the engine's."""

    tensors: dict[str, torch.Tensor]
    fused: dict[str, list[str]]
    stacked: dict[str, list[str]]


@st.composite
def models(draw: st.DrawFn) -> Model:
    model = Model({}, {}, {})
    for number in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        model.tensors[f"t{number}"] = counted(shape, dtype, number)
    for number in range(draw(st.integers(0, 2))):
        dtype = draw(st.sampled_from(DTYPES))
        width = draw(st.lists(st.integers(1, 4), max_size=1))
        parts = [f"f{number}.p{i}" for i in range(draw(st.integers(1, 3)))]
        for i, part in enumerate(parts):
            rows = 2 * draw(st.integers(0, 3))
            model.tensors[part] = counted((rows, *width), dtype, 10 * number + i)
        model.fused[f"f{number}.all"] = parts
    if draw(st.booleans()):
        shape = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
        experts = [f"e.{i}.w" for i in range(draw(st.integers(2, 12)))]
        for i, expert in enumerate(experts):
            model.tensors[expert] = counted(shape, torch.float32, i)
        model.stacked["e.all"] = experts
    return model


def captures(draw: st.DrawFn, model: Model) -> list[Captured]:
    mesh = tuple(draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (1, 2), (3, 2)])))
    ranks = torch.Size(mesh).numel()
    entries: list[list[Entry]] = [[] for _ in range(ranks)]
    rules: list[Rule] = [optional(rename("module.{*path}", "{*path}"))]
    own = dict(model.tensors)
    for name, parts in model.fused.items():
        if draw(st.booleans()):  # The trainer fuses them too, and cuts what results.
            tensors = [own.pop(part) for part in parts]
            own[name] = torch.cat(tensors)
            sizes = [len(tensor) for tensor in tensors]
            sources = zip(parts, sizes, strict=True)
            rules.append(fuse(name, [take(p, Slice(0, size=n)) for p, n in sources]))
    for name, experts in model.stacked.items():
        if draw(st.booleans()):
            own[name] = torch.stack([own.pop(expert) for expert in experts])
            rules.append(stack(name, take("e.{expert}.w"), over="expert"))
    for name, tensor in own.items():
        prefixed = "module." * draw(st.booleans()) if name in model.tensors else ""
        cuts = placements(draw, tuple(tensor.shape), mesh)
        held = hold(prefixed + name, tensor, mesh, cuts)
        for rank in range(ranks):
            entries[rank].append(held[rank])
    return [captured(pieces_of(draw(st.permutations(mine)), rules)) for mine in entries]


def fused_here(
    draw: st.DrawFn, model: Model, rank: int, ranks: int
) -> tuple[list[Wanted], set[str]]:
    """Tensor-parallel slices of each part, side by side, as engines hold them."""
    found: list[Wanted] = []
    done: set[str] = set()
    for name, parts in model.fused.items():
        tensors = [model.tensors[part] for part in parts]
        if ranks > 2 or not any(tensor.numel() for tensor in tensors):
            continue
        half = [len(tensor) // ranks for tensor in tensors]
        pairs = list(zip(tensors, half, strict=True))
        value = torch.cat([t.narrow(0, rank * size, size) for t, size in pairs])
        sources = [
            take(part, Slice(0, rank, ranks, size=len(tensor)))
            for part, tensor in zip(parts, tensors, strict=True)
        ]
        memory = sentinel(value.shape, value.dtype)
        found.append(Wanted(name, memory, memory, value, (fuse(name, sources),)))
        done |= set(parts)
    return found, done


def stacked_here(model: Model, rank: int, ranks: int) -> tuple[list[Wanted], set[str]]:
    """The experts of this rank in one tensor."""
    found: list[Wanted] = []
    done: set[str] = set()
    for name, experts in model.stacked.items():
        each = -(-len(experts) // ranks)
        mine = experts[rank * each : (rank + 1) * each]
        done |= set(experts)
        if not mine:
            continue
        value = torch.stack([model.tensors[expert] for expert in mine])
        memory = sentinel(value.shape, value.dtype)
        rule = stack(name, take("e.{expert}.w"), over="expert", first=rank * each)
        found.append(Wanted(name, memory, memory, value, (rule,)))
    return found, done


def registrations(
    draw: st.DrawFn, model: Model
) -> tuple[list[Registered], list[list[Wanted]]]:
    ranks = draw(st.integers(1, 3))
    fuses, stacks = draw(st.booleans()), draw(st.booleans())
    mirrored = draw(st.booleans())
    dims = {
        name: draw(st.integers(-1, tensor.dim() - 1))
        for name, tensor in model.tensors.items()
    }
    registered: list[Registered] = []
    wanted: list[list[Wanted]] = []
    for rank in range(ranks):
        mine: list[Wanted] = []
        done: set[str] = set()
        if fuses:
            found, names = fused_here(draw, model, rank, ranks)
            mine, done = mine + found, done | names
        if stacks:
            found, names = stacked_here(model, rank, ranks)
            mine, done = mine + found, done | names
        for name, tensor in model.tensors.items():
            if name not in done:
                dim = dims[name]
                cut = Replicate() if dim < 0 else ShardPlacement(dim)
                (box,) = placed(tuple(tensor.shape), (ranks,), (rank,), (cut,))
                memory = destination(draw, box.sizes, tensor.dtype)
                mine.append(cut_by_hand(name, tensor, box, memory))
        mine = draw(st.permutations(mine))
        rules = [rule for entry in mine for rule in entry.rules]
        state = {entry.name: entry.entry for entry in mine}
        registered.append(register(state, names=rules, mirrored=mirrored))
        wanted.append(mine)
    return registered, wanted


# The transport, in plain slices


def move(plan: Plan, trainers: list[Captured], replica: list[Registered]) -> None:
    """Carry the runs out, then take what arrived into the registered tensors."""
    sizes = [slot_layout(mine.manifest).nbytes for mine in replica]
    slots = [torch.full((size,), SENTINEL, dtype=torch.uint8) for size in sizes]
    counts = [torch.zeros(size, dtype=torch.int32) for size in sizes]
    for pair in plan.pairs:
        for run in plan.runs(*pair):
            data = raw(trainers[pair[0]].tensors[run.source])
            for row in range(run.rows):
                start = run.source_offset + row * run.source_stride
                at = run.target_offset + row * run.target_stride
                end = at + run.row_bytes
                slots[pair[1]][at:end] = data[start : start + run.row_bytes]
                counts[pair[1]][at:end] += 1
    for mine, slot, count in zip(replica, slots, counts, strict=True):
        assert not (count > 1).any()
        offsets = slot_layout(mine.manifest).offsets
        for spec, offset, tensor in zip(
            mine.manifest.tensors, offsets, mine.tensors, strict=True
        ):
            if tensor.numel() == 0:
                continue
            strides = packed_strides(spec.box.sizes, tensor.itemsize)
            strides = strides if spec.place is None else spec.place.strides
            for position in product(*[range(size) for size in tensor.shape]):
                at = offset + sum(i * s for i, s in zip(position, strides, strict=True))
                element = slot[at : at + tensor.itemsize].clone().view(tensor.dtype)
                tensor[position] = element[0]


@settings(deadline=None)
@given(st.data())
def test_every_generator_gets_exactly_its_part_of_every_tensor(
    data: st.DataObject,
) -> None:
    model = data.draw(models())
    trainers = captures(data.draw, model)
    replica, wanted = registrations(data.draw, model)
    held, registered = (
        [mine.manifest for mine in side] for side in (trainers, replica)
    )
    fit = check(held, registered, replica_name="gen-0")
    plan = make_plan(held, registered)
    move(plan, trainers, replica)

    assert fit.nbytes == sum(plan.nbytes(*pair) for pair in plan.pairs)
    for mine in wanted:
        for entry in mine:
            assert torch.equal(raw(entry.value), raw(entry.memory)), entry.name
