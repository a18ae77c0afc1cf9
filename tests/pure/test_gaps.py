"""What lies beside strided pieces, compared with flags for each byte."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.gaps import Rows, Strided, gaps
from weightsync.overlap import loops_of


def placed(tensor: torch.Tensor) -> Strided:
    start = int(tensor.storage_offset()) * tensor.itemsize
    return Strided(start, *loops_of(tensor))


def beside(whole: torch.Tensor, *views: torch.Tensor) -> list[Rows]:
    return gaps(0, whole.untyped_storage().nbytes(), [placed(view) for view in views])


def test_nothing_is_beside_what_is_filled() -> None:
    whole = torch.zeros(6, 4, 5)
    halves = whole[:, :, ::2], whole[:, :, 1::2]

    assert [] == beside(whole, whole)
    assert [] == beside(whole, whole.permute(2, 0, 1))
    assert [] == beside(whole, *halves)
    assert [] == beside(torch.zeros(0))


def test_all_is_beside_nothing() -> None:
    assert [Rows(0, 1, 80, 80)] == beside(torch.zeros(20))


def test_padding_is_one_row() -> None:
    whole = torch.zeros(8, 4)

    assert [Rows(80, 1, 48, 48)] == beside(whole, whole[:3], whole[3:5])
    assert [Rows(0, 1, 16, 16), Rows(32, 1, 16, 16)] == beside(
        whole, whole[1], whole[3:]
    )


def test_columns_leave_rows_however_many_they_are() -> None:
    whole = torch.zeros(1 << 20, 8, dtype=torch.uint8)

    rows = Rows(3, (1 << 20) - 1, 4, 8)
    last = Rows(rows.start + 8 * rows.rows, 1, 4, 4)
    assert [rows, last] == beside(whole, whole[:, :3], whole[:, 7:])


def test_every_other_element_leaves_rows_too() -> None:
    whole = torch.zeros(1 << 10, 1 << 10, dtype=torch.bfloat16)
    found = beside(whole, whole[:, ::2])

    assert whole.nbytes // 2 == sum(rows.rows * rows.row_bytes for rows in found)
    assert len(found) < 1 << 12


def test_pieces_that_repeat_differently_are_told_apart_row_by_row() -> None:
    whole = torch.zeros(4, 6, dtype=torch.uint8)
    found = beside(whole, whole[:, :2], whole[1:3, 4:])

    assert [
        Rows(2, 1, 4, 4),
        Rows(8, 1, 2, 2),
        Rows(14, 1, 2, 2),
        Rows(20, 1, 4, 4),
    ] == found


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A buffer, and views of parts of it that do not overlap."""
    dims = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.uint8, torch.float32]))
    whole = torch.zeros(dims, dtype=dtype)
    parts = [whole]
    for _ in range(draw(st.integers(0, 6))):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, part.dim() - 1))
        if part.shape[dim] > 1 and draw(st.booleans()):
            step = draw(st.integers(2, 3))
            slices = [
                (slice(None),) * dim + (slice(i, None, step),) for i in range(step)
            ]
            parts += [part[at] for at in slices]
        else:
            at = draw(st.integers(0, part.shape[dim]))
            parts += part.split([at, part.shape[dim] - at], dim)
    parts = [part for part in parts if part.numel()]
    some = draw(st.lists(st.sampled_from(parts), unique_by=id)) if parts else []
    return whole, [part.mT if part.dim() > 1 else part for part in some]


@given(views())
def test_each_byte_is_in_a_piece_or_beside_all_of_them(
    drawn: tuple[torch.Tensor, list[torch.Tensor]],
) -> None:
    whole, parts = drawn
    for part in parts:
        part.fill_(1)
    size = whole.nbytes
    taken = torch.zeros(size, dtype=torch.int32)
    for start, rows, row_bytes, stride in beside(whole, *parts):
        for row in range(rows):
            taken[start + row * stride : start + row * stride + row_bytes] += 1
    free = (whole.flatten() == 0).repeat_interleave(whole.itemsize).int()

    assert free.tolist() == taken.tolist()
