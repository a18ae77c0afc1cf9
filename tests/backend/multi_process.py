"""Test cases of torch's own harness, which starts a process for every rank.

``test_multi_process.py`` runs this as a program on two emulated GPUs. The name of the
backend is all that the cases know of weightsync.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import (
    MultiProcessTestCase,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_utils import run_tests


class Case(MultiProcessTestCase):
    """What the cases have in common: two ranks, with a GPU and a default group each."""

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def begin(self) -> torch.device:
        """Open the default group, which the harness destroys."""
        device = torch.device("cuda", self.rank)
        torch.cuda.set_device(device)
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(
            "weightsync-nccl2", store=store, rank=self.rank, world_size=self.world_size
        )
        return device


class Working(Case):
    """Cases that do not fail."""

    @skip_if_lt_x_gpu(2)
    def test_exchanges(self) -> None:
        device = self.begin()
        other = 1 - self.rank
        mine = torch.tensor([self.rank + 1.0])
        total, told = mine.to(device), mine.to(device)
        dist.all_reduce(total)
        dist.broadcast(told, src=1)
        received = torch.empty(1, device=device)
        operations = [
            dist.P2POp(dist.isend, mine.to(device), other),
            dist.P2POp(dist.irecv, received, other),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        dist.barrier()

        assert [3.0] == total.tolist()
        assert [2.0] == told.tolist()
        assert [other + 1.0] == received.tolist()

    @skip_if_lt_x_gpu(3)
    def test_more_gpus_than_there_are(self) -> None:
        self.fail("there are two")


class Failing(Case):
    """Cases that fail."""

    def test_one_rank_fails(self) -> None:
        device = self.begin()
        number = torch.tensor([1.0]).to(device)
        dist.all_reduce(number)

        if self.rank == 0:
            # Rank 1 does not come any more, and the harness ends the wait for it.
            dist.all_reduce(number)
            torch.cuda.synchronize()

        assert self.rank == 0, f"rank {self.rank} found what it should not"


if __name__ == "__main__":
    run_tests()
