"""Counting what a process calls of CUDA and NCCL."""

from __future__ import annotations

import os

import pytest

from weightsync import testing
from weightsync.errors import UnsupportedError


def counts() -> list[int]:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("nccl")
    number = torch.ones(4).cuda()
    before = testing.calls()
    for _ in range(3):
        dist.all_reduce(number)
    torch.cuda.synchronize()
    after = testing.calls()
    dist.destroy_process_group()
    names = ("ncclAllReduce", "cudaDeviceSynchronize", "cudaMalloc")
    return [after.get(name, 0) - before.get(name, 0) for name in names]


@testing.requires_emulator()
def test_every_call_is_counted_by_its_name() -> None:
    assert [[3, 1, 0]] * 2 == testing.emulated(counts, 2)


def launches() -> list[int]:
    import torch

    before = testing.calls()
    with pytest.raises(RuntimeError, match="emulator"):
        torch.ones(4).cuda().add(1)
    after = testing.calls()
    return [
        after[name] - before.get(name, 0) for name in after if "aunch" in name.lower()
    ]


@testing.requires_emulator()
def test_a_kernel_that_is_refused_is_counted_too() -> None:
    assert [[1]] == testing.emulated(launches, 1)


def test_without_the_emulator_there_are_no_counts() -> None:
    with pytest.raises(UnsupportedError, match="on the emulator only"):
        testing.calls()
