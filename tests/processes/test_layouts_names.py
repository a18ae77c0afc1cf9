"""Rules of names on either side: wrappers that a rule removes, and fused weights."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightsync
from tests.processes.meshes import (
    Team,
    as_lists,
    counted,
    filled,
    fsdp,
    generator,
    joined,
    local_of,
    sharded,
)
from tests.processes.rig import SECONDS, Mode, open_job, raw, receive_all
from weightsync.names import Rule, Slice, fuse, llama, rename, stack, take

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.processes.harness import Processes
    from tests.processes.meshes import Rank
    from tests.processes.rig import Job

pytestmark = pytest.mark.anyio

State = dict[str, torch.Tensor]

NAMES = ["0.weight", "encoder.module.weight"]

STRIP_MODULE = [rename("module.{*path}", "{path}")]
STRIP_BASE = [rename("{*path}.base_layer.{kind}", "{path}.{kind}")]

WRAPPED = {
    "compiled": ("_orig_mod.{}", []),
    "data parallel and compiled": ("module._orig_mod.{}", STRIP_MODULE),
    "compiled and data parallel": ("_orig_mod.module.{}", STRIP_MODULE),
    "sharded": ("_fsdp_wrapped_module.{}", []),
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def numbered(names: Sequence[str]) -> State:
    return {name: torch.full((3,), float(i)) for i, name in enumerate(names)}


async def replica(job: Job, names: Sequence[Rule] = ()) -> tuple[Any, State]:
    weights = {name: torch.full((3,), -777.0) for name in NAMES}
    transport = await job.enter(
        weightsync.Generator(
            *(job.address, weights),
            replica="gen-0",
            names=names,
            rank=0,
            world_size=1,
            timeout=SECONDS,
        )
    )
    for trainer in job.trainers:
        await trainer.wait_for_replicas(1)
    return transport, weights


@pytest.mark.parametrize("case", WRAPPED)
async def test_wrappers_in_names_go_by_themselves_or_by_a_rule(case: str) -> None:
    wrapper, rules = WRAPPED[case]
    pushed = numbered([wrapper.format(name) for name in NAMES])
    errors: list[Any] = []
    async with open_job(2) as job:
        transport, weights = await replica(job)
        if rules:
            errors = await job.outcomes(pushed)
        await job.deliver(transport, pushed, names=rules)

    assert [[0.0] * 3, [1.0] * 3] == [weights[name].tolist() for name in NAMES]
    assert all("missing: '0.weight'" in str(error) for error in errors)
    assert all("unexpected: 'module.0.weight'" in str(error) for error in errors)
    assert (2 if rules else 0) == len(errors)


async def test_a_checkpointed_layer_has_one_name_in_every_call() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
    )

    layer = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(1, 3, bias=False)))
    pairs = list(layer.named_parameters())
    found = []
    async with open_job() as job:
        weight = torch.full((3, 1), -777.0)
        transport = await job.join_one({"0.weight": weight})
        for pushed in (dict(pairs), layer.state_dict(), pairs):
            await job.deliver(transport, pushed)
            found.append(raw(weight))
            weight.fill_(-777)

    assert "0._checkpoint_wrapped_module.weight" == pairs[0][0]
    assert [raw(pairs[0][1])] * 3 == found


ABOVE_BASE = [rename("{*path}.{kind}", "{path}.base_layer.{kind}")]


@pytest.mark.parametrize("side", ["trainer", "generator"])
async def test_the_layers_below_adapters_are_found_by_a_rule(side: str) -> None:
    pushed = numbered([name.replace(".weight", ".base_layer.weight") for name in NAMES])
    pushed |= {"0.lora_A.weight": torch.ones(2), "0.lora_B.weight": torch.ones(2)}
    ignore = ["*.lora_?.*"]
    mine, theirs = (STRIP_BASE, []) if side == "trainer" else ([], ABOVE_BASE)
    async with open_job(2) as job:
        transport, weights = await replica(job, theirs)
        errors = await job.outcomes(pushed, names=mine)
        await job.deliver(transport, pushed, names=mine, ignore=ignore)

    assert [[0.0] * 3, [1.0] * 3] == [weights[name].tolist() for name in NAMES]
    assert all("unexpected: '0.lora_A.weight'" in str(error) for error in errors)


async def test_two_names_that_a_rule_makes_one_are_refused_on_every_rank() -> None:
    weight = torch.full((3,), -777.0)
    pushed = numbered(["module.w", "w"])
    async with open_job(2) as job:
        transport = await job.join_one({"w": weight})
        errors = await job.outcomes(pushed, names=STRIP_MODULE)
        untouched = weight.tolist()
        await job.deliver(transport, {"module.w": torch.ones(3)}, names=STRIP_MODULE)

    assert [weightsync.PlanError] * 2 == [type(error) for error in errors]
    assert all("'module.w' and 'w'" in str(error) for error in errors)
    assert ([-777.0] * 3, [1.0] * 3) == (untouched, weight.tolist())


async def test_a_rule_that_matches_nothing_is_refused_on_every_rank() -> None:
    pushed = numbered(NAMES)
    async with open_job(2) as job:
        transport, _ = await replica(job)
        errors = await job.outcomes(pushed, names=STRIP_BASE)
        (update,) = await job.deliver(transport, pushed)

    assert [weightsync.PlanError] * 2 == [type(error) for error in errors]
    assert all("base_layer" in str(error) for error in errors)
    assert 1 == update.version


PARTS = {"q": 8, "k": 2, "v": 3}
SPLIT = [
    fuse("qkv", [take(name, Slice(0, size=size)) for name, size in PARTS.items()]),
    stack("experts", take("experts.{number}.w"), over="number", count=5),
]


def _fused_trainer(rank: Rank) -> list[list[int]]:
    mesh = rank.mesh(rank.world)
    stacked = counted(5, 4, 3)
    state_dict = {
        "qkv": sharded(counted(13, 4), mesh, 0),
        "experts": sharded(stacked, mesh, 0),
    }
    rank.push(state_dict, names=SPLIT)
    state_dict["experts"] = sharded(stacked, mesh, 1)
    rank.push(state_dict, names=SPLIT)
    return [list(local_of(tensor).shape) for tensor in state_dict.values()]


async def test_shards_of_fused_and_stacked_tensors_arrive_as_their_parts(
    processes: Processes, address: str
) -> None:
    whole = {name: filled(size, 4) for name, size in PARTS.items()}
    whole |= {f"experts.{number}.w": filled(4, 3) for number in range(5)}
    found = []
    team = Team(processes, address, 3, _fused_trainer)
    async with joined(team, [whole]) as replicas:
        for _ in range(2):
            await replicas.receive()
            found.append(as_lists(whole))
            for tensor in whole.values():
                tensor.fill_(-777)
    shapes = team.results()

    blocks = counted(13, 4).split(list(PARTS.values()))
    expected = dict(zip(PARTS, blocks, strict=True)) | {
        f"experts.{number}.w": expert for number, expert in enumerate(counted(5, 4, 3))
    }
    assert [as_lists(expected)] * 2 == found
    assert [[[5, 4], [5, 2, 3]], [[5, 4], [5, 2, 3]], [[3, 4], [5, 0, 3]]] == shapes


# A real model with FSDP2, and the fused tensors of an engine

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def _qwen3(rank: Rank, replicas: int) -> dict[str, list[Any]]:
    """Push a tiny model in shards; return the bits of all of it."""
    from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).to(torch.bfloat16)
    state_dict = model.state_dict()
    full = {name: t.view(torch.int16).tolist() for name, t in state_dict.items()}
    mesh = rank.mesh(rank.world)
    for layer in model.model.layers:
        fsdp(layer, mesh)
    rank.push(fsdp(model, mesh).state_dict(), replicas=replicas)
    return full


def layers(rank: int, ranks: int) -> Iterator[tuple[str, tuple[str, ...], int | None]]:
    """Names of an engine, what they are made of, and the dim that is cut."""
    yield "model.embed_tokens.weight", ("model.embed_tokens.weight",), 0
    yield "lm_head.weight", ("lm_head.weight",), 0
    yield "model.norm.weight", ("model.norm.weight",), None
    for number in range(2):
        path = f"model.layers.{number}."
        for name in (
            *("input_layernorm.weight", "post_attention_layernorm.weight"),
            *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
        ):
            yield path + name, (path + name,), None
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            yield path + name, (path + name,), 1
        for name, parts in (
            ("self_attn.qkv_proj", [f"self_attn.{part}_proj" for part in "qkv"]),
            ("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"]),
        ):
            sources = tuple([f"{path}{part}.weight" for part in parts])
            yield f"{path}{name}.weight", sources, 0


def fused(full: State, rank: int, ranks: int) -> State:
    """Make by hand what one rank of an engine holds."""
    made: State = {}
    for name, sources, dim in layers(rank, ranks):
        parts = [full[source] for source in sources]
        if dim is not None:
            parts = [part.chunk(ranks, dim)[rank] for part in parts]
        made[name] = torch.cat(parts)
    return made


def engine(ranks: int) -> list[State]:
    """Make what the ranks of an engine hold before anything has arrived."""
    sizes = SimpleNamespace(**CONFIG)
    rows = sizes.num_attention_heads * sizes.head_dim
    pairs = sizes.num_key_value_heads * sizes.head_dim
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "norm": (hidden,),
        "q_norm": (sizes.head_dim,),
        "k_norm": (sizes.head_dim,),
        "embed_tokens": (sizes.vocab_size // ranks, hidden),
        "lm_head": (sizes.vocab_size // ranks, hidden),
        "qkv_proj": ((rows + 2 * pairs) // ranks, hidden),
        "o_proj": (hidden, rows // ranks),
        "gate_up_proj": (2 * inner // ranks, hidden),
        "down_proj": (hidden, inner // ranks),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return [
        {
            name: torch.full(shapes[name.split(".")[-2]], -777, dtype=torch.bfloat16)
            for name, _, _ in layers(rank, ranks)
        }
        for rank in range(ranks)
    ]


async def test_a_real_model_in_shards_fills_the_fused_tensors_of_engines(
    processes: Processes, address: str
) -> None:
    kinds: list[tuple[int, Mode]] = [(2, "staged"), (2, "inplace"), (1, "swap")]
    engines = [engine(ranks) for ranks, _ in kinds]
    team = Team(processes, address, 2, _qwen3, len(kinds))
    async with AsyncExitStack() as stack:
        transports = [
            await stack.enter_async_context(
                generator(
                    *(address, engines[number], number, rank),
                    mode=mode,
                    names=llama(
                        SimpleNamespace(**CONFIG), tensor_parallel=(rank, ranks)
                    ),
                )
            )
            for number, (ranks, mode) in enumerate(kinds)
            for rank in range(ranks)
        ]
        updates = await receive_all(transports)
    first, second = team.results()
    full = {
        name: torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)
        for name, bits in first.items()
    }

    assert first == second
    assert [1] * 5 == [update.version for update in updates]
    for ranks, held in zip([ranks for ranks, _ in kinds], engines, strict=True):
        for rank, state in enumerate(held):
            expected = fused(full, rank, ranks)
            assert expected.keys() == state.keys()
            different = [n for n in state if raw(expected[n]) != raw(state[n])]
            assert [] == different
