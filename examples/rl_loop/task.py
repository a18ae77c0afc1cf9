"""The task of rl_loop.py: to sort digits. Its model, and its samples on their way.

The model is a Qwen3 of two layers, built from a config. A verifier rewards what it
writes. Samples go from generators to trainers through a bounded queue.
"""

from __future__ import annotations

import fcntl
import socket
import sys
import termios
from dataclasses import dataclass
from queue import Empty, Full
from typing import TYPE_CHECKING

import msgspec
import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from options import Options
    from torch import Tensor
    from transformers import Qwen3ForCausalLM

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
