"""On what a job is stuck, by dumps that are made by hand."""

from __future__ import annotations

from dataclasses import replace

from weightsync.cli.recorded import Dump, Group, Kind, Operation, Shape
from weightsync.cli.stuck import Fault, Verdict, judge

WORLD = Group("0", (0, 1, 2), "default_pg")
PAIR = Group("1", (0, 1), "undefined")
NUMBER = Shape("Float", (4,))


def collective(rank: int, number: int, *, finished: bool = False) -> Operation:
    return Operation(
        kind=Kind.COLLECTIVE,
        name="all_reduce",
        group=WORLD,
        rank=rank,
        number=number,
        peer=None,
        inputs=(NUMBER,),
        outputs=(NUMBER,),
        nbytes=0,
        finished=finished,
        seconds=1.0,
        where="",
    )


def towards(kind: Kind, rank: int, peer: int, number: int = 1) -> Operation:
    made = collective(rank, number)
    name = "put" if kind is Kind.SIGNAL else kind.value
    return replace(made, kind=kind, name=name, peer=peer, group=PAIR)


def dump(rank: int, *operations: Operation) -> Dump:
    groups = tuple(group for group in (WORLD, PAIR) if rank in group.ranks)
    return Dump(rank, "host", 100 + rank, "asked", groups, operations)


def faults(verdict: Verdict) -> list[tuple[Fault, tuple[int, ...], tuple[int, ...]]]:
    return [(each.fault, each.waiting, each.missed) for each in verdict.findings]


def test_nothing_is_stuck_where_everything_is_finished() -> None:
    found = judge(dump(rank, collective(rank, 1, finished=True)) for rank in range(3))

    assert found == Verdict((), (), (), ())


def test_a_rank_that_does_not_come_is_named() -> None:
    found = judge(
        [
            dump(0, collective(0, 1, finished=True), collective(0, 2)),
            dump(1, collective(1, 1, finished=True)),
            dump(2, collective(2, 1, finished=True), collective(2, 2)),
        ]
    )

    assert faults(found) == [(Fault.MISSING, (0, 2), (1,))]
    assert found.findings[0].operation.number == 2
    assert found.roots == (1,)


def test_a_rank_that_only_has_not_heard_of_the_end_is_not_missed() -> None:
    found = judge(
        [
            dump(0, collective(0, 1, finished=True)),
            dump(1, collective(1, 1)),
            dump(2, collective(2, 1)),
        ]
    )

    assert faults(found) == [(Fault.UNFINISHED, (1, 2), ())]
    assert found.roots == ()


def test_a_rank_whose_ring_forgot_the_operation_is_beyond_it() -> None:
    found = judge(
        [
            dump(0, collective(0, 1)),
            dump(1, collective(1, 9, finished=True)),
            dump(2, collective(2, 1)),
        ]
    )

    assert faults(found) == [(Fault.UNFINISHED, (0, 2), ())]


def test_a_rank_without_a_dump_is_missed_and_said_to_be_silent() -> None:
    found = judge([dump(0, collective(0, 1)), dump(2, collective(2, 1))])

    assert faults(found) == [(Fault.MISSING, (0, 2), (1,))]
    assert found.silent == (1,)


def test_the_rank_that_calls_another_collective_is_named() -> None:
    other = replace(collective(1, 1), name="broadcast")
    found = judge(
        [dump(0, collective(0, 1)), dump(1, other), dump(2, collective(2, 1))]
    )

    assert faults(found) == [(Fault.MISMATCH, (0, 1, 2), (1,))]
    assert found.findings[0].details[1] == "rank 1 called broadcast of Float[4]"
    assert found.roots == (1,)


def test_sizes_and_dtypes_have_to_agree_and_shapes_do_not() -> None:
    longer, double = Shape("Float", (5,)), Shape("Double", (4,))
    square = Shape("Float", (2, 2))
    for shape, expected in ((longer, 1), (double, 1), (square, 0)):
        odd = replace(
            collective(2, 1, finished=True), inputs=(shape,), outputs=(shape,)
        )
        same = [dump(rank, collective(rank, 1, finished=True)) for rank in range(2)]
        found = judge([*same, dump(2, odd)])

        assert len(found.findings) == expected


def test_shares_of_an_all_to_all_may_differ() -> None:
    odd = Shape("Float", (7,))
    calls = [replace(collective(rank, 1), name="all_to_all") for rank in range(3)]
    calls[1] = replace(calls[1], inputs=(odd,))
    found = judge(dump(rank, call) for rank, call in enumerate(calls))

    assert faults(found) == [(Fault.UNFINISHED, (0, 1, 2), ())]


def test_without_a_majority_no_rank_is_blamed() -> None:
    calls = [replace(collective(rank, 1), group=PAIR) for rank in range(2)]
    calls[1] = replace(calls[1], name="broadcast")
    found = judge([dump(0, calls[0]), dump(1, calls[1]), dump(2)])

    assert faults(found) == [(Fault.MISMATCH, (0, 1), (0, 1))]


def test_a_message_that_nobody_receives_is_named() -> None:
    found = judge([dump(0, towards(Kind.SEND, 0, 1, 3)), dump(1), dump(2)])

    assert faults(found) == [(Fault.UNMATCHED, (0,), (1,))]
    assert found.roots == (1,)


def test_a_message_of_another_size_is_named_once() -> None:
    short = replace(towards(Kind.RECEIVE, 1, 0), outputs=(Shape("Float", (3,)),))
    found = judge([dump(0, towards(Kind.SEND, 0, 1)), dump(1, short), dump(2)])

    assert faults(found) == [(Fault.MISMATCH, (0, 1), (1,))]


def test_a_wait_for_a_signal_that_was_not_sent_is_named() -> None:
    found = judge(
        [
            dump(0, towards(Kind.SIGNAL, 0, 1, 4)),
            dump(1, towards(Kind.WAIT, 1, 0, 5)),
            dump(2),
        ]
    )

    assert faults(found) == [(Fault.UNSIGNALLED, (1,), (0,))]
    assert found.findings[0].details == ("rank 0 has sent 4 signals to rank 1",)
    assert found.roots == (0,)


def test_a_wait_whose_signal_was_sent_is_none_of_the_peers_faults() -> None:
    found = judge(
        [
            dump(0, towards(Kind.SIGNAL, 0, 1, 5)),
            dump(1, towards(Kind.WAIT, 1, 0, 5)),
            dump(2),
        ]
    )

    assert found.findings == ()


def test_the_root_is_the_rank_that_holds_up_those_that_hold_up_others() -> None:
    found = judge(
        [
            dump(0),
            dump(1, towards(Kind.WAIT, 1, 0)),
            dump(2, collective(2, 1)),
        ]
    )

    assert (Fault.MISSING, (2,), (0, 1)) in faults(found)
    assert found.roots == (0,)


def test_ranks_that_wait_for_each_other_are_a_cycle() -> None:
    found = judge(
        [
            dump(0, towards(Kind.WAIT, 0, 1)),
            dump(1, towards(Kind.WAIT, 1, 0)),
            dump(2),
        ]
    )

    assert found.roots == ()
    assert found.cycle == (0, 1)


def test_members_that_do_not_come_to_a_reconfigure_are_named() -> None:
    change = replace(collective(0, 1), kind=Kind.MEMBERSHIP, name="reconfigure")
    found = judge([dump(0, change), dump(1), dump(2)])

    assert faults(found) == [(Fault.MISSING, (0,), (1, 2))]
    assert found.roots == (1, 2)
