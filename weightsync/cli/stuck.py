"""On what a job is stuck, by what its ranks recorded; pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

from weightsync.cli.recorded import Group, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from weightsync.cli.recorded import Dump, Operation, Shape


class Fault(Enum):
    """What is wrong with an operation."""

    MISSING = "some ranks have not come"
    MISMATCH = "the ranks do not agree"
    UNFINISHED = "all ranks have come, and it is not finished"
    UNMATCHED = "the other rank has no call that answers it"
    UNSIGNALLED = "the other rank has not sent the signal"


@dataclass(frozen=True, slots=True)
class Finding:
    """An operation that does not end.

    ``waiting`` are the ranks that are in it, ``missed`` those that they wait for.
    """

    fault: Fault
    group: Group
    operation: Operation
    waiting: tuple[int, ...]
    missed: tuple[int, ...]
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """All findings, and the ranks at their root.

    A ``root`` is waited for, and waits for nobody. A ``cycle`` is ranks that wait for
    each other. ``silent`` are members of groups that left no dump.
    """

    findings: tuple[Finding, ...]
    roots: tuple[int, ...]
    cycle: tuple[int, ...]
    silent: tuple[int, ...]


def judge(dumps: Iterable[Dump]) -> Verdict:
    """Find what the ranks wait for."""
    by_rank = {dump.rank: dump for dump in dumps}
    groups = {group for dump in by_rank.values() for group in dump.groups}
    findings: list[Finding] = []
    for group in sorted(groups):
        members = {rank: by_rank[rank] for rank in group.ranks if rank in by_rank}
        calls = {
            rank: [call for call in dump.operations if call.group == group]
            for rank, dump in members.items()
        }
        findings += _collectives(group, calls)
        findings += _messages(group, calls)
        findings += _signals(group, calls)
        findings += _memberships(group, calls)
    silent = {rank for group in groups for rank in group.ranks} - set(by_rank)
    roots, cycle = _roots(findings)
    return Verdict(tuple(findings), roots, cycle, tuple(sorted(silent)))


_Calls = dict[int, list["Operation"]]


def _collectives(group: Group, calls: _Calls) -> Iterator[Finding]:
    """Yield the first collective that does not end: later ones wait for it."""
    by_number: dict[int, _Calls] = defaultdict(dict)
    last = dict.fromkeys(calls, 0)
    for rank, operations in calls.items():
        for call in operations:
            if call.kind is Kind.COLLECTIVE:
                by_number[call.number].setdefault(rank, []).append(call)
                last[rank] = max(last[rank], call.number)
    for number in sorted(by_number):
        # Whoever reached it and has it no more in its ring is beyond it.
        missed = [rank for rank in group.ranks if last.get(rank, 0) < number]
        finding = _collective(group, by_number[number], missed)
        if finding is not None:
            yield finding
            return


def _collective(group: Group, came: _Calls, missed: Sequence[int]) -> Finding | None:
    differing = _disagreement(came)
    if differing:
        ranks, first = tuple(sorted(came)), came[min(came)][0]
        odd = _minority(came)
        return Finding(Fault.MISMATCH, group, first, ranks, odd, differing)
    unfinished = tuple(rank for rank in sorted(came) if not _are_finished(came[rank]))
    if not unfinished:
        return None
    fault = Fault.MISSING if missed else Fault.UNFINISHED
    operation = came[unfinished[0]][0]
    return Finding(fault, group, operation, unfinished, tuple(missed))


def _are_finished(operations: Iterable[Operation]) -> bool:
    return all(call.finished for call in operations)


def _disagreement(came: _Calls) -> tuple[str, ...]:
    """Say what each rank called, if that differs."""
    if len({_signature(operations) for operations in came.values()}) < 2:
        return ()
    return tuple(
        f"rank {rank} called {', '.join(map(str, operations))}"
        for rank, operations in sorted(came.items())
    )


def _minority(came: _Calls) -> tuple[int, ...]:
    """Return the ranks that differ from most of them; all, if there is no majority."""
    alike: dict[object, list[int]] = defaultdict(list)
    for rank, operations in came.items():
        alike[_signature(operations)].append(rank)
    most = max(alike.values(), key=len)
    if 2 * len(most) <= len(came):
        return tuple(sorted(came))
    return tuple(sorted(set(came) - set(most)))


def _signature(operations: Sequence[Operation]) -> object:
    """Return what all ranks have to agree upon."""
    return tuple(
        (
            call.name,
            # Ranks may give or get shares of different sizes here.
            () if call.name in ("all_to_all", "scatter") else _counts(call.inputs),
            () if call.name in ("all_to_all", "gather") else _counts(call.outputs),
        )
        for call in operations
    )


def _counts(shapes: Iterable[Shape]) -> object:
    return tuple((shape.dtype, shape.count) for shape in shapes)


_Side = tuple[Kind, int, int]
"""The sends, or the receives, from one rank to another."""


def _messages(group: Group, calls: _Calls) -> Iterator[Finding]:
    """Yield the first message of each pair of ranks that does not arrive."""
    sides: dict[_Side, dict[int, Operation]] = defaultdict(dict)
    for call in (call for operations in calls.values() for call in operations):
        if call.kind is Kind.SEND and call.peer is not None:
            sides[call.kind, call.rank, call.peer][call.number] = call
        elif call.kind is Kind.RECEIVE and call.peer is not None:
            sides[call.kind, call.peer, call.rank][call.number] = call
    for side in sorted(sides, key=lambda side: (side[1:], side[0].value)):
        kind, source, target = side
        other = Kind.RECEIVE if kind is Kind.SEND else Kind.SEND
        answers = sides.get((other, source, target), {})
        found = (
            _message(group, sides[side][each], answers) for each in sorted(sides[side])
        )
        yield from islice((each for each in found if each is not None), 1)


def _message(
    group: Group, call: Operation, answers: Mapping[int, Operation]
) -> Finding | None:
    if call.finished or call.peer is None:
        return None
    reached = max(answers, default=0)
    if call.number > reached:
        return Finding(Fault.UNMATCHED, group, call, (call.rank,), (call.peer,))
    answer = answers.get(call.number)
    if answer is None or call.kind is Kind.RECEIVE:
        return None  # Forgotten by the ring, or told from the side of the sender.
    sent, received = _counts(call.inputs), _counts(answer.outputs)
    if sent == received:
        return None
    details = (f"rank {call.rank} called {call}", f"rank {call.peer} called {answer}")
    return Finding(
        Fault.MISMATCH, group, call, (call.rank, call.peer), (call.peer,), details
    )


def _signals(group: Group, calls: _Calls) -> Iterator[Finding]:
    """Yield the first wait of each pair of ranks for a signal that was not sent."""
    sent: dict[tuple[int, int | None], int] = defaultdict(int)
    waits: dict[tuple[int, int], Operation] = {}
    for call in (call for operations in calls.values() for call in operations):
        if call.kind is Kind.SIGNAL:
            pair = call.rank, call.peer
            sent[pair] = max(sent[pair], call.number)
        elif call.kind is Kind.WAIT and not call.finished and call.peer is not None:
            waits.setdefault((call.rank, call.peer), call)
    for rank, peer in sorted(waits):
        call = waits[rank, peer]
        so_far = sent[peer, rank]
        if so_far < call.number:
            detail = f"rank {peer} has sent {so_far} signals to rank {rank}"
            yield Finding(Fault.UNSIGNALLED, group, call, (rank,), (peer,), (detail,))


def _memberships(group: Group, calls: _Calls) -> Iterator[Finding]:
    """Yield a change of the members that some of them have not come to."""
    within = {
        rank: call
        for rank, operations in sorted(calls.items())
        for call in operations
        if call.kind is Kind.MEMBERSHIP and not call.finished
    }
    if within:
        missed = tuple(rank for rank in group.ranks if rank not in within)
        fault = Fault.MISSING if missed else Fault.UNFINISHED
        first = within[min(within)]
        yield Finding(fault, group, first, tuple(within), missed)


def _roots(findings: Iterable[Finding]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return who is waited for and does not wait, and else who waits in a circle."""
    waits: dict[int, set[int]] = defaultdict(set)
    for finding in findings:
        for rank in finding.waiting:
            waits[rank] |= set(finding.missed) - {rank}
    waited_for = {rank for missed in waits.values() for rank in missed}
    roots = tuple(sorted(rank for rank in waited_for if not waits.get(rank)))
    if roots or not waited_for:
        return roots, ()
    return (), _cycle(waits)


def _cycle(waits: Mapping[int, set[int]]) -> tuple[int, ...]:
    path: list[int] = []
    rank = min(each for each, missed in waits.items() if missed)
    while rank not in path:
        path.append(rank)
        rank = min(waits[rank])
    return tuple(path[path.index(rank) :])
