"""The options of rl_loop.py: one field, one option of the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from chaos import LEASE


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


def parse_options(description: str) -> Options:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
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
