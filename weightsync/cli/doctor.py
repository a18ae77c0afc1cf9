"""The command ``weightsync doctor``: what is in use here, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Final

from weightsync.cli.findings import Driver, Emulator, Findings, Nccl, find

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

DESCRIPTION: Final = """\
Says which torch and which NCCL are in use and what is known to be wrong with them, what
the driver offers, and whether the GPUs are emulated. Nothing is changed, and no GPU is
used for more than these questions."""

REPOSITORY: Final = "https://github.com/NVIDIA/nccl/issues"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="the same, for programs")


def run(found: argparse.Namespace) -> None:
    """Look, and print what was found."""
    findings = find()
    if found.json:
        print(json.dumps(dataclasses.asdict(findings), indent=2))
    else:
        print("\n".join(_lines(findings)))


def _lines(found: Findings) -> Iterator[str]:
    torch = found.torch
    cuda = f"for CUDA {torch.cuda}" if torch.cuda else "without CUDA"
    yield f"torch:    {torch.version}, built {cuda}"
    yield f"core:     built for torch {torch.core_built_for}"
    yield from _nccl(found.nccl)
    yield from _driver(found.driver)
    yield f"emulator: {_emulator(found.emulator)}"


def _nccl(found: Nccl) -> Iterator[str]:
    if found.problem:
        yield f"NCCL:     none: {found.problem}"
        return
    yield f"NCCL:     {found.version}, {found.path}"
    yield "          process groups take 2.29 to 2.32, pushes 2.30.7 to 2.32"
    if found.faults:
        yield f"          known faults of {found.version}:"
    for fault in found.faults:
        link = f" ({REPOSITORY}/{fault.issue})" if fault.issue else ""
        until = ".".join(map(str, fault.fixed or ()))
        yield f"          - {fault.text}{link}; " + (
            f"repaired in {until}" if until else "not repaired in any version"
        )
        if fault.avoided:
            yield f"            avoided: {fault.avoided}"


def _driver(found: Driver) -> Iterator[str]:
    known = [f"CUDA {found.cuda}"] if found.cuda else []
    known += [each for each in (found.kernel, found.problem) if each]
    yield f"driver:   {'; '.join(known)}"
    for device in found.devices:
        memory = "can" if device.virtual_memory else "cannot"
        peers = ", ".join(map(str, device.peers)) or "no other"
        yield (
            f"GPU {device.index}:    {device.name}: {memory} map memory as windows "
            f"need it (VMM); direct access (P2P) to {peers}"
        )


def _emulator(found: Emulator) -> str:
    if found.active:
        return "in place: these GPUs and this NCCL are emulated"
    if found.available:
        return "not in use; weightsync emulate puts a program on it"
    return f"not to be had: {found.problem}"
