"""When a partial push replaces exactly what is kept of a full one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightsync.merging import can_merge, places_of
from weightsync.spec import Box, Manifest, TensorSpec

WHOLE = Box((0,), (8,))
HALVES = (Box((0,), (4,)), Box((4,), (4,)))


def piece(
    name: str, box: Box = WHOLE, dtype: str = "float32", tied: int | None = None
) -> TensorSpec:
    return TensorSpec(name, dtype, (8,), box, tied)


def held(*pieces: TensorSpec) -> Manifest:
    return Manifest.of(pieces)


FULL = (
    held(piece("a", HALVES[0]), piece("b")),
    held(piece("a", HALVES[1]), piece("b")),
)


def test_names_that_every_rank_holds_as_before_replace_what_is_kept() -> None:
    parts = (held(piece("a", HALVES[0])), held(piece("a", HALVES[1])))

    assert can_merge(FULL, parts)
    assert [0] == places_of(FULL[0], parts[0])
    assert [1, 0] == places_of(FULL[0], held(piece("b"), piece("a", HALVES[0])))


def test_a_copy_that_is_not_pushed_would_stay_old() -> None:
    assert not can_merge(FULL, (held(piece("b")), held()))


def test_another_cut_or_dtype_or_name_does_not_fit() -> None:
    for wrong in (
        (held(piece("a")), held()),
        (held(piece("b", dtype="int32")), held(piece("b"))),
        (held(piece("c")), held(piece("c"))),
        (held(piece("a", HALVES[1])), held(piece("a", HALVES[0]))),
    ):
        assert not can_merge(FULL, wrong)


def test_names_that_share_memory_must_come_together() -> None:
    full = (held(piece("a"), piece("b", tied=0), piece("c")),)

    assert can_merge(full, (held(piece("a"), piece("b", tied=0)),))
    assert can_merge(full, (held(piece("c")),))
    assert not can_merge(full, (held(piece("a")),))
    assert not can_merge(full, (held(piece("a"), piece("b")),))
    assert not can_merge((held(piece("a"), piece("b")),), (full[0],))


@given(st.sets(st.sampled_from("abcd")), st.randoms(use_true_random=False))
def test_any_names_of_a_full_push_fit_in_any_order(
    names: set[str], random: object
) -> None:
    order = sorted(names)
    random.shuffle(order)  # type: ignore[attr-defined] # of hypothesis
    full = [held(*[piece(name, half) for name in "abcd"]) for half in HALVES]
    parts = [held(*[piece(name, half) for name in order]) for half in HALVES]
    places = places_of(full[0], parts[0])

    assert can_merge(full, parts)
    assert order == ["abcd"[place] for place in places]
