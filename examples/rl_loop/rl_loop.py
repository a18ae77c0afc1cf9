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

The parts, from top to bottom of this file:

    options
    task        prompts, and the verifier that rewards answers
    model       a Qwen3 of two layers, built from a config
    generators  sample without pause; new weights arrive meanwhile
    trainers    GRPO on those samples; each step ends in a push of a new version
    display     live figures, and the closing table
    main        starts the processes, watches them, judges the run
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import signal
import socket
import sys
import termios
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Empty, Full
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.to_thread
import msgspec
import torch
import torch.distributed as dist
from chaos import LEASE, Chaos
from fused_qwen3 import fuse
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import pad
from torch.nn.utils import clip_grad_norm_

import weightsync
import weightsync.blocking
import weightsync.names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module
    from transformers import Qwen3ForCausalLM

    from weightsync import MembershipEvent
    from weightsync.names import Rule

SPAWN = multiprocessing.get_context("spawn")
PATIENCE = 60.0  # seconds that any process waits for another

# ---------------------------------------------------------------------------------
# Options


def option(default: Any, meaning: str, **settings: Any) -> Any:
    """A field of Options, and what `--help` says about it."""
    return field(default=default, metadata={"help": meaning, **settings})


@dataclass(frozen=True)
class Options:
    """The command line: one field, one option."""

    steps: int = option(250, "training steps; each ends in a push of a new version")
    trainers: int = option(1, "trainer processes; gradients are averaged over them")
    generators: int = option(2, "generator processes, each a replica of the model")
    fsdp: bool = option(
        False, "shard the model over the trainers, two at least", action="store_true"
    )
    fused: bool = option(
        False, "fuse projections in the generators' model", action="store_true"
    )
    chaos: bool = option(
        False, "kill, freeze and add generators while it learns", action="store_true"
    )
    digits: int = option(4, "digits to sort")
    prompts: int = option(16, "different prompts in a batch")
    group: int = option(16, "answers to each prompt; GRPO compares them")
    width: int = option(64, "hidden size of the model, a multiple of 8")
    layers: int = option(2, "layers of the model")
    learning_rate: float = option(7e-4, "of AdamW")
    clip: float = option(0.2, "how far the importance ratio may leave 1")
    max_staleness: int = option(4, "drop samples more than this many versions old")
    queue: int = option(2, "batches that may wait for the trainers")
    on_busy: Literal["wait", "skip"] = option(
        "wait",
        "what a push does about a replica still busy with the version before",
        choices=("wait", "skip"),
    )
    lease: float = option(10.0, "seconds without a sign of life that end a process")
    margin: float = option(0.4, "the reward must rise by this, or the run has failed")
    seed: int = option(0, "of everything random")
    time_limit: float = option(300.0, "seconds after which the run is given up")
    json: str = option("", "write the closing figures to this file")

    def __post_init__(self) -> None:
        counts = ("steps", "trainers", "generators", "digits", "prompts", "queue")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1")
        if self.group < 2:
            raise ValueError("--group must be at least 2: answers are compared")
        if self.max_staleness < (self.on_busy == "skip"):
            raise ValueError("--max-staleness must be at least 0, and 1 with skip")
        if self.width < 8 or self.width % 8:
            raise ValueError("--width must be a multiple of 8")


def parse_options() -> Options:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for each in fields(Options):
        settings = dict(each.metadata)
        if "action" not in settings:
            settings["type"] = type(each.default)
        if each.default != "":
            settings["help"] += f" (default: {each.default})"
        flag = "--" + each.name.replace("_", "-")
        parser.add_argument(flag, default=each.default, **settings)
    chosen = vars(parser.parse_args())
    if chosen["fsdp"]:
        chosen["trainers"] = max(2, chosen["trainers"])
    if chosen["chaos"]:
        chosen["lease"] = min(LEASE, chosen["lease"])
    try:
        return Options(**chosen)
    except ValueError as error:
        parser.error(str(error))


# ---------------------------------------------------------------------------------
# Task: sort digits

VOCABULARY = "0123456789="
EQUALS = VOCABULARY.index("=")


def make_prompts(options: Options) -> Tensor:
    """Rows of random digits and an equals sign, each repeated for its group."""
    digits = torch.randint(0, EQUALS, (options.prompts, options.digits))
    return pad(digits, (0, 1), value=EQUALS).repeat_interleave(options.group, dim=0)


def verify(tokens: Tensor, digits: int) -> Tensor:
    """The reward: the fraction of positions that hold the right digit."""
    asked, answer = tokens[:, :digits], tokens[:, digits + 1 :]
    return (answer == asked.sort(dim=1).values).float().mean(dim=1)


@dataclass(frozen=True)
class Batch:
    """Samples, all made with the same version of the weights."""

    version: int
    tokens: list[list[int]]  # prompt and answer
    logprobs: list[list[float]]  # of the answer, when it was sampled
    rewards: list[float]


class Samples:
    """Batches on their way to the trainers: a bounded queue between processes.

    It is a socket that carries whole messages. There is no lock, and no message is
    ever half there: whoever is killed or stopped while it writes disturbs nobody.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in, self._out = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    def put_nowait(self, batch: Batch) -> None:
        """Append a batch; raises Full where so many wait already, by their bytes."""
        message = msgspec.msgpack.encode(batch)
        waiting = fcntl.ioctl(self._in, termios.TIOCOUTQ, bytes(4))
        if int.from_bytes(waiting, sys.byteorder) >= self._limit * len(message):
            raise Full
        try:
            self._in.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise Full from None

    def get(self, timeout: float) -> Batch:
        """Take the next batch; raises Empty."""
        self._out.settimeout(timeout)
        try:
            message = self._out.recv(1 << 20)
        except TimeoutError:
            raise Empty from None
        return msgspec.msgpack.decode(message, type=Batch)


# ---------------------------------------------------------------------------------
# Model


def build_model(options: Options) -> Qwen3ForCausalLM:
    """A small language model with random weights."""
    # Imported here, for it takes seconds and the main process has no model.
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=options.width // 4,
        max_position_embeddings=2 * options.digits + 1,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)


# ---------------------------------------------------------------------------------
# Generators


@dataclass(frozen=True)
class Job:
    """What every process is given."""

    options: Options
    samples: Samples
    weights_address: str
    gradients_address: str


@dataclass(frozen=True)
class SwitchReport:
    """What a generator tells the main process about each new version."""

    seconds: float


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


@dataclass(frozen=True)
class StepReport:
    """What a trainer tells the main process about each step."""

    rank: int
    step: int
    reward: float
    sample_version: int
    staleness: int
    samples: int
    dropped: int
    ratio_error: float | None  # |ratio - 1|, where the samples have our very version
    push_seconds: float
    push_bytes: int
    skipped: int  # replicas
    failed: int  # replicas, which are out of the pool


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
# Display


@dataclass
class Tally:
    """What the processes reported, and the figures made from it."""

    options: Options
    steps: list[StepReport] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)
    events: list[MembershipEvent] = field(default_factory=list)
    strikes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    first_step: float = 0.0

    def add(self, report: StepReport | SwitchReport | MembershipEvent) -> None:
        """Count a report in."""
        if isinstance(report, SwitchReport):
            self.switches.append(report.seconds)
            return
        if isinstance(report, weightsync.MembershipEvent):
            self.events.append(report)
            return
        self.steps.append(report)
        self.first_step = self.first_step or time.monotonic()

    @property
    def window(self) -> int:
        """How many rewards an average is taken over: a twentieth of the run."""
        return max(1, self.options.steps * self.options.trainers // 20)

    def rewards(self) -> list[float]:
        """The reward over the run, in averages over one window each."""
        raw = [step.reward for step in self.steps]
        cuts = range(0, len(raw), self.window)
        return [fmean(raw[cut : cut + self.window]) for cut in cuts]

    def members(self, kind: Literal["joined", "left", "failed"]) -> int:
        """How many times a generator joined, left or failed."""
        return sum((e.role, e.kind) == ("replica", kind) for e in self.events)

    def samples_per_second(self) -> float:
        """Samples trained on, since the first step ended."""
        samples = sum(step.samples for step in self.steps[1:])
        return samples / max(time.monotonic() - self.first_step, 1e-9)

    def figures(self) -> dict[str, Any]:
        """The outcome of the run."""
        own = [step for step in self.steps if step.rank == 0]
        staleness = [step.staleness for step in self.steps]
        errors = [e for s in self.steps if (e := s.ratio_error) is not None]
        return {
            "reward_start": fmean(s.reward for s in self.steps[: self.window]),
            "reward_end": fmean(s.reward for s in self.steps[-self.window :]),
            "versions": 1 + len(own),
            "push_bytes": max(step.push_bytes for step in own),
            "push_ms": 1e3 * median(step.push_seconds for step in own),
            "switches": len(self.switches),
            "switch_ms": 1e3 * median(self.switches) if self.switches else None,
            "push_ms_max": 1e3 * max(step.push_seconds for step in own),
            "skipped": sum(step.skipped for step in own),
            "failed": sum(step.failed for step in own),
            "joined": self.members("joined"),
            "lost": self.members("failed"),
            "strikes": self.strikes,
            "sample_version_min": min(step.sample_version for step in self.steps),
            "sample_version_max": max(step.sample_version for step in self.steps),
            "staleness_min": min(staleness),
            "staleness_mean": fmean(staleness),
            "staleness_max": max(staleness),
            "samples": sum(step.samples for step in self.steps),
            "dropped": sum(step.dropped for step in self.steps),
            "samples_per_second": self.samples_per_second(),
            "ratio_error": max(errors, default=None),
            "seconds": time.monotonic() - self.started,
            "options": asdict(self.options),
        }


def progress_line(tally: Tally) -> str:
    """Where the run stands."""
    recent = tally.steps[-tally.window :]
    step = recent[-1].step
    return (
        f"step {step:4}/{tally.options.steps}  version {step + 1:4}"
        f"  reward {fmean(step.reward for step in recent):.3f}"
        f"  staleness {fmean(step.staleness for step in recent):.1f}"
        f"  push {1e3 * median(step.push_seconds for step in recent):5.1f} ms"
        f"  {tally.samples_per_second():6.0f} samples/s"
    )


def live_view(tally: Tally) -> Table:
    """The same with a bar, and the reward over the run."""
    curve = "".join("▁▂▃▄▅▆▇█"[min(int(8 * mean), 7)] for mean in tally.rewards())
    view = Table.grid()
    view.add_row(ProgressBar(tally.options.steps, tally.steps[-1].step, width=60))
    view.add_row(progress_line(tally))
    view.add_row(f"reward {curve}")
    return view


@contextmanager
def display(console: Console, tally: Tally) -> Iterator[Callable[[StepReport], None]]:
    """Yields what to call after each step: a live view, or lines for a log."""
    every = max(1, tally.options.steps // 20)

    def line(report: StepReport) -> None:
        if report.rank == 0 and report.step % every == 0:
            print(progress_line(tally), flush=True)

    if console.is_terminal:
        with Live(console=console, refresh_per_second=8) as live:
            yield lambda _: live.update(live_view(tally))
    else:
        yield line


def closing_table(figures: dict[str, Any]) -> Table:
    """The figures that a reader looks for."""
    rows = (
        ("reward at the start", "reward_start", "{:.3f}"),
        ("reward at the end", "reward_end", "{:.3f}"),
        ("versions pushed", "versions", "{}"),
        ("bytes of a push to all", "push_bytes", "{:,}"),
        ("push, median ms", "push_ms", "{:.2f}"),
        ("push, longest ms", "push_ms_max", "{:.2f}"),
        ("switch, median ms", "switch_ms", "{:.2f}"),
        ("times that a generator joined", "joined", "{}"),
        ("times that a generator failed", "lost", "{}"),
        ("replicas skipped by a push", "skipped", "{}"),
        ("staleness, mean", "staleness_mean", "{:.2f}"),
        ("staleness, max", "staleness_max", "{}"),
        ("samples trained on", "samples", "{:,}"),
        ("samples dropped as too old", "dropped", "{:,}"),
        ("samples per second", "samples_per_second", "{:,.0f}"),
        ("|ratio - 1| at staleness 0, max", "ratio_error", "{:.1e}"),
        ("seconds in all", "seconds", "{:.1f}"),
    )
    table = Table("figure", title="Asynchronous RL, weights moved by weightsync")
    table.add_column("value", justify="right")
    for label, key, form in rows:
        value = figures[key]
        table.add_row(label, "-" if value is None else form.format(value))
    return table


# ---------------------------------------------------------------------------------
# Main


class RunError(Exception):
    """A process failed, or the run took too long; the message says which."""


@dataclass
class Child:
    """A process that we started, and the pipe it reports through."""

    name: str
    process: multiprocessing.process.BaseProcess
    reports: Connection
    ended: bool = False

    def finish(self) -> None:
        """To be called when its pipe has closed; raises unless it ended well."""
        self.process.join(PATIENCE)
        code = self.process.exitcode
        if code == 0:
            return
        how = "hangs at its end" if code is None else "failed"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        raise RunError(f"{self.name} (pid {self.process.pid}) {how}")

    def stop(self) -> None:
        """End it whatever it does."""
        self.process.terminate()
        self.process.join(5)
        self.process.kill()
        self.process.join(5)
        self.reports.close()


def child_main(
    target: Callable[[int, Connection, Job], None],
    index: int,
    reports: Connection,
    job: Job,
) -> None:
    """What every child process runs."""
    # Ctrl-C reaches the whole process group; the main process ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    target(index, reports, job)


def start(
    name: str, target: Callable[[int, Connection, Job], None], index: int, job: Job
) -> Child:
    """Start one process."""
    ours, theirs = SPAWN.Pipe(duplex=False)
    arguments = (target, index, theirs, job)
    process = SPAWN.Process(target=child_main, name=name, args=arguments, daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    return Child(name, process, ours)


def start_generator(index: int, job: Job) -> Child:
    """Start a generator, at the beginning or later."""
    return start(f"gen-{index}", run_generator, index, job)


def free_addresses(count: int) -> list[str]:
    """Different addresses of this host that nobody listens at."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in servers]
    for each in servers:
        each.close()
    return addresses


def follow(
    trainers: list[Child], generators: list[Child], chaos: Chaos | None, limit: float
) -> Iterator[Any]:
    """Yields what the children report, until the last of them has ended well."""
    deadline = time.monotonic() + limit
    while not all(child.ended for child in trainers + generators):
        if time.monotonic() > deadline:
            raise RunError(f"it was not over within {limit:.0f} s")
        learning = not all(trainer.ended for trainer in trainers)
        if chaos is not None:
            chaos.act() if learning else chaos.finish()
        running = [child for child in trainers + generators if not child.ended]
        pipes = {child.reports: child for child in running}
        for pipe in wait(list(pipes), timeout=1.0 if chaos is None else 0.05):
            child = pipes[pipe]
            try:
                yield child.reports.recv()
            except (EOFError, OSError):
                child.ended = True
                if chaos is None or not (learning and chaos.replaces(child)):
                    child.finish()


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
                elif chaos is not None and isinstance(
                    report, weightsync.MembershipEvent
                ):
                    print("members:", report, flush=True)
                    chaos.heard(report)
    finally:
        for child in trainers + generators:
            child.stop()
    if chaos is not None:
        tally.strikes = chaos.strikes
    return tally


def main() -> int:
    """Run, show and judge; returns the exit code."""
    options = parse_options()
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
