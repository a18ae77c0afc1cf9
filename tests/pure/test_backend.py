"""The compiled core and the torch that it meets."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import weightsync
from weightsync import backend


def test_importing_registers_the_backend_for_the_cpu() -> None:
    assert backend.SHM in dist.Backend.backend_capability
    assert ["cpu"] == dist.Backend.backend_capability[backend.SHM]


def test_a_core_for_another_torch_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend._C, "TORCH_VERSION", "2.13")
    with pytest.raises(
        weightsync.UnsupportedError, match=r"built for torch 2\.13 .* reinstall"
    ):
        backend._check_torch()
