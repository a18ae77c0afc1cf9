"""The figures of rl_loop.py: what its processes report, live and in a closing table."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

import weightsync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from options import Options
    from rich.console import Console

    from weightsync import MembershipEvent


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


@dataclass(frozen=True)
class SwitchReport:
    """What a generator tells the main process about each new version."""

    seconds: float


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
