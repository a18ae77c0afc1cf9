"""Asynchronous RL of a small language model, the weights moved by weightsync.

    python examples/rl_loop/rl_loop.py

The task is to sort: the model reads `7 3 9 3 =` and must write `3 3 7 9`.
It starts from random weights and sees no solved example, only the reward: the
fraction of the answer's positions that hold the right digit.

    trainer --- weights: puts with signals, by weightsync --> generators
       ^                                                          |
       +------ samples, each with its version: bounded queue -----+

With --fsdp each trainer rank holds and pushes a shard of every tensor. With --fused
the generators hold q, k and v in one tensor. Nothing is gathered for a push.
With --chaos generators die, freeze and come meanwhile: see chaos.py.

Nobody waits for a round to end: a generator samples with the version it has until
the next one is whole. So samples are a few versions old when they are trained on.
The importance ratio of GRPO corrects for that; samples too old are dropped.

All that concerns weightsync is in this file, from top to bottom:

    generators  sample without pause; new weights arrive meanwhile
    trainers    GRPO on those samples; each step ends in a push of a new version
    main        starts the processes, watches them, judges the run

Beside it: options.py, task.py (prompts, rewards, the model, the queue of samples),
figures.py (the live display and the closing table), processes.py (their starts and
ends).
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from queue import Empty, Full
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.to_thread
import torch
import torch.distributed as dist
from chaos import Chaos
from figures import StepReport, SwitchReport, Tally, closing_table, display
from fused_qwen3 import fuse
from options import Options, parse_options
from processes import PATIENCE, Child, Job, RunError, follow, free_addresses, start
from rich.console import Console
from task import Batch, Samples, build_model, make_prompts, verify
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

import weightsync
import weightsync.blocking
import weightsync.names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from torch import Tensor
    from torch.nn import Module
    from transformers import Qwen3ForCausalLM

    from weightsync import MembershipEvent
    from weightsync.names import Rule

# ---------------------------------------------------------------------------------
# Generators


@torch.inference_mode()
def sample(model: Module, version: int, options: Options) -> Batch:
    """Answers to fresh prompts, and their rewards."""
    tokens, logprobs = make_prompts(options), []
    for _ in range(options.digits):  # so few that a cache would not pay
        distribution = model(input_ids=tokens).logits[:, -1].log_softmax(-1)
        chosen = torch.multinomial(distribution.exp(), 1)
        logprobs.append(distribution.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], dim=1)
    rewards = verify(tokens, options.digits).tolist()
    return Batch(version, tokens.tolist(), torch.cat(logprobs, 1).tolist(), rewards)


def sample_pinned(
    transport: weightsync.Generator, model: Module, options: Options
) -> Batch:
    """A batch of one version: what becomes whole meanwhile is switched in after it."""
    with transport.use() as weights:
        if weights.version is None:
            raise RuntimeError("sampling began before the first version arrived")
        return sample(model, weights.version, options)


async def hand_over(batch: Batch, samples: Samples) -> None:
    """Put a batch into the queue as soon as there is room."""
    while True:
        try:
            return samples.put_nowait(batch)
        except Full:
            await anyio.sleep(0.002)


async def sample_forever(
    transport: weightsync.Generator, model: Module, job: Job
) -> None:
    """Sample batch after batch until cancelled."""
    while True:
        batch = await anyio.to_thread.run_sync(
            sample_pinned, transport, model, job.options
        )
        await hand_over(batch, job.samples)


async def take_in(transport: weightsync.Generator, reports: Connection) -> None:
    """Switch every new version in, until the trainers close."""
    async for update in transport:
        reports.send(SwitchReport(update.switched))


async def generate(index: int, reports: Connection, job: Job) -> None:
    """Sample and take new versions in, both at once."""
    model = build_model(job.options)  # random, and unlike the trainer's
    rules: Sequence[Rule] = ()
    if job.options.fused:
        fuse(model)
        rules = weightsync.names.qwen3(model.config)
    async with weightsync.Generator(
        job.weights_address,
        model.state_dict(),
        names=rules,
        replica=f"gen-{index}",
        rank=0,
        world_size=1,
        lease=job.options.lease,
    ) as transport:
        try:
            await transport.receive(timeout=PATIENCE)  # no sample without a version
        except weightsync.ClosedError:
            return  # it came after the last one
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sample_forever, transport, model, job)
            await take_in(transport, reports)
            tasks.cancel_scope.cancel()


def run_generator(index: int, reports: Connection, job: Job) -> None:
    """A generator process."""
    torch.manual_seed(job.options.seed + 1000 + index)
    try:
        anyio.run(generate, index, reports, job)
    except* weightsync.PeerError as errors:  # a trainer failed, or we were frozen
        raise SystemExit(f"gen-{index} ends: {errors.exceptions[0]}") from None


# ---------------------------------------------------------------------------------
# Trainers


def take(version: int, job: Job) -> tuple[Batch, int]:
    """The next batch that is not too old, and how many samples were dropped."""
    dropped = 0
    while True:
        try:
            batch = job.samples.get(timeout=PATIENCE)
        except Empty:
            raise RuntimeError(f"no samples came for {PATIENCE:.0f} s") from None
        if version - batch.version <= job.options.max_staleness:
            return batch, dropped
        dropped += len(batch.rewards)


def advantages(rewards: list[float], group: int) -> Tensor:
    """How much better an answer is than the others to the same prompt."""
    grouped = torch.tensor(rewards).view(-1, group)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    return (centred / (grouped.std(dim=1, keepdim=True) + 0.01)).view(-1, 1)


def importance_ratio(model: Module, batch: Batch, digits: int) -> Tensor:
    """How much likelier each token is by now than when it was sampled."""
    tokens = torch.tensor(batch.tokens)
    logits = model(input_ids=tokens[:, :-1]).logits[:, digits:]
    answer = tokens[:, digits + 1 :, None]
    logprobs: Tensor = logits.log_softmax(-1).gather(2, answer).squeeze(2)
    return (logprobs - torch.tensor(batch.logprobs)).exp()


def shard(model: Qwen3ForCausalLM) -> None:
    """Keep this rank's part of each parameter, and gather a layer when it runs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def average_gradients(model: Module) -> None:
    """Each trainer has seen other samples; their mean is the gradient."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def train_step(
    model: Module, optimizer: torch.optim.Optimizer, batch: Batch, options: Options
) -> float:
    """One step of GRPO; returns the largest deviation of the ratio from 1."""
    ratio = importance_ratio(model, batch, options.digits)
    clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
    advantage = advantages(batch.rewards, options.group)
    loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call] # torch has no type for it
    if not options.fsdp:  # which averages them itself
        average_gradients(model)
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float((ratio.detach() - 1).abs().max())


def push(
    transport: weightsync.blocking.Trainer,
    model: Module,
    version: int,
    on_busy: Literal["wait", "skip"],
    require: Literal["any", "all"],
) -> weightsync.PushReport:
    """Send the weights to every generator, as a new version."""
    return transport.push(
        model.state_dict(),
        version=version,
        on_busy=on_busy,
        require=require,
        timeout=PATIENCE,
    )


def train(
    transport: weightsync.blocking.Trainer,
    model: Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    job: Job,
) -> Iterator[StepReport]:
    """Take samples, make a step, push; again and again."""
    options = job.options
    # Whoever fails is named by the report, or with "all" by an error.
    require: Literal["any", "all"] = "any" if options.chaos else "all"
    push(transport, model, 1, "wait", require)  # version 1 is the random start
    skipped = 0
    for version in range(1, options.steps + 1):
        batch, dropped = take(version, job)
        staleness = version - batch.version
        error = train_step(model, optimizer, batch, options)
        # A replica that missed two in a row might have no sample fresh enough.
        on_busy = "wait" if skipped else options.on_busy
        pushed = push(transport, model, version + 1, on_busy, require)
        skipped = sum(r.status == "skipped" for r in pushed.replicas.values())
        yield StepReport(
            rank=rank,
            step=version,
            reward=fmean(batch.rewards),
            sample_version=batch.version,
            staleness=staleness,
            samples=len(batch.rewards),
            dropped=dropped,
            ratio_error=error if staleness == 0 else None,
            push_seconds=pushed.seconds,
            push_bytes=pushed.nbytes,
            skipped=skipped,
            failed=len(pushed.failed),
        )


def follow_members(
    transport: weightsync.blocking.Trainer, tell: Callable[[Any], None]
) -> None:
    """Tell who joined, left and failed, until the transport is closed."""
    for event in transport.events(after=0):
        tell(event)


def run_trainer(rank: int, reports: Connection, job: Job) -> None:
    """A trainer process: plain synchronous code, hence the blocking Trainer."""
    size = job.options.trainers
    torch.manual_seed(job.options.seed)  # the same start on all ranks
    dist.init_process_group("gloo", job.gradients_address, rank=rank, world_size=size)
    # Before the transport: on a busy machine imports stop all threads for seconds.
    model = build_model(job.options)
    if job.options.fsdp:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), job.options.learning_rate)
    sending = threading.Lock()

    def tell(report: StepReport | MembershipEvent) -> None:
        with sending:
            reports.send(report)

    with weightsync.blocking.Trainer(
        job.weights_address, rank=rank, world_size=size, lease=job.options.lease
    ) as transport:
        if rank == 0:
            arguments = (transport, tell)
            threading.Thread(target=follow_members, args=arguments, daemon=True).start()
        transport.wait_for_replicas(job.options.generators, timeout=PATIENCE)
        for report in train(transport, model, optimizer, rank, job):
            tell(report)
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------
# Main


def start_generator(index: int, job: Job) -> Child:
    """Start a generator, at the beginning or later."""
    return start(f"gen-{index}", run_generator, index, job)


def run(options: Options, console: Console) -> Tally:
    """Start all processes and follow them to the end."""
    tally = Tally(options)
    job = Job(options, Samples(options.queue), *free_addresses(2))
    trainers = [
        start(f"trainer-{rank}", run_trainer, rank, job)
        for rank in range(options.trainers)
    ]
    generators = [start_generator(index, job) for index in range(options.generators)]

    def launch(index: int) -> Child:
        generators.append(start_generator(index, job))
        return generators[-1]

    chaos = Chaos(list(generators), launch, options.seed) if options.chaos else None
    try:
        named = (f"{c.name} (pid {c.process.pid})" for c in trainers + generators)
        print("started", ", ".join(named), flush=True)
        with display(console, tally) as show:
            for report in follow(trainers, generators, chaos, options.time_limit):
                tally.add(report)
                if isinstance(report, StepReport):
                    show(report)
                if chaos is not None:
                    chaos.heard(report)
    finally:
        for child in trainers + generators:
            child.stop()
    if chaos is not None:
        tally.strikes = chaos.strikes
    return tally


def main() -> int:
    """Run, show and judge; returns the exit code."""
    options = parse_options(__doc__ or "")
    console = Console()
    try:
        figures = run(options, console).figures()
    except KeyboardInterrupt:
        print("interrupted; all processes were ended", file=sys.stderr)
        return 130
    except RunError as error:
        print(f"the run failed: {error}", file=sys.stderr)
        return 1
    console.print(closing_table(figures))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
    if figures["reward_end"] < figures["reward_start"] + options.margin:
        print(f"the reward did not rise by {options.margin}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
