"""Collectives of any objects."""

from __future__ import annotations

from typing import Any, Final

import torch.distributed as dist

from tests.conformance.group import at_once, job, rank, world
from weightsync import testing

WORLD: Final = 3

# A rank that launches a kernel fails at once, and others may wait for it.
LIMIT: Final = 2.0


def thing(sender: int, target: int = 0) -> dict[str, Any]:
    """Return an object whose size depends on the sender."""
    return {"sender": sender, "target": target, "data": "x" * (100 * sender)}


def gathered_everywhere(backend: str) -> list[Any]:
    with job(backend), at_once():
        found: list[Any] = [None] * world()
        dist.all_gather_object(found, thing(rank()))
        return found


def test_all_ranks_get_the_objects_of_all(backend: str) -> None:
    found = testing.emulated(
        gathered_everywhere, WORLD, args=[backend], hang_seconds=LIMIT
    )

    assert [[thing(each) for each in range(WORLD)]] * WORLD == found


def broadcasts(backend: str) -> list[Any]:
    with job(backend), at_once():
        found: list[Any] = [thing(2), "two", None] if rank() == 2 else [None] * 3
        dist.broadcast_object_list(found, 2)
        return found


def test_a_list_of_objects_goes_from_one_rank_to_all(backend: str) -> None:
    found = testing.emulated(broadcasts, WORLD, args=[backend], hang_seconds=LIMIT)

    assert [[thing(2), "two", None]] * WORLD == found


def gathered(backend: str) -> list[Any] | None:
    with job(backend), at_once():
        found: list[Any] | None = [None] * world() if rank() == 1 else None
        dist.gather_object(thing(rank()), found, 1)
        return found


def test_one_rank_gets_the_objects_of_all(backend: str) -> None:
    found = testing.emulated(gathered, WORLD, args=[backend], hang_seconds=LIMIT)

    assert [None, [thing(each) for each in range(WORLD)], None] == found


def scattered(backend: str) -> Any:
    with job(backend), at_once():
        given = [thing(1, each) for each in range(world())] if rank() == 1 else None
        found: list[Any] = [None]
        dist.scatter_object_list(found, given, 1)
        return found[0]


def test_each_rank_gets_an_object_of_its_own(backend: str) -> None:
    found = testing.emulated(scattered, WORLD, args=[backend], hang_seconds=LIMIT)

    assert [thing(1, each) for each in range(WORLD)] == found


def sent(backend: str) -> list[Any]:
    with job(backend), at_once():
        if rank() == 1:
            dist.send_object_list([thing(1), 7], 0)
            return []
        found: list[Any] = [None, None]
        sender = dist.recv_object_list(found, 1)
        return [sender, *found]


def test_a_list_of_objects_is_sent(backend: str) -> None:
    found = testing.emulated(sent, 2, args=[backend], hang_seconds=LIMIT)

    assert [[1, thing(1), 7], []] == found
