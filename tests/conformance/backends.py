"""The process-group backends that the suite runs against, and what they cannot do.

A test asks for the fixture ``backend`` and is run once for each of ``BACKENDS``. What a
backend cannot do is a ``Fault``, with the reason. A fault that is gone fails the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import torch

PEERS: Final = ("nccl", "nccl2")
"""Those of torch."""

BACKENDS: Final = (*PEERS, "weightsync-nccl2")

# What a backend does not offer: a module of tests that NEEDS it leaves it out.
LACKING: Final = {
    "nccl": ("windows", "reconfigure"),
}

# Which take complex numbers themselves, and so in every collective.
COMPLEX: Final = ("weightsync-nccl2",)

# Which want a list of outputs for each input in `all_gather_coalesced`. torch's
# documentation has one for each rank.
LISTS_OF_INPUTS: Final = ("nccl", "nccl2")

# Those that let the process go on when an operation is out of time, whatever torch's
# variables say: the group is aborted, and later calls raise.
GO_ON: Final = ("weightsync-nccl2",)

TORCH: Final = ".".join(torch.__version__.split(".")[:2])


@dataclass(frozen=True, slots=True)
class Fault:
    """What a backend does not do, by no fault of the emulator.

    ``test`` is the name of the function, with the identifiers of its parameters other
    than the backend in brackets where only some of them fail. ``torch`` lists the minor
    versions that have the fault.

    Without ``cases`` the whole test is expected to fail. With them, which are patterns
    of names in the dicts that a test passes to ``deviations``, the test passes, and
    each of these cases is answered with something else than what is promised: with an
    error that contains ``says``, or with anything where that is empty.
    """

    backend: str
    test: str
    reason: str
    torch: tuple[str, ...] = ("2.14", "2.15")
    cases: tuple[str, ...] = ()
    says: str = ""

    def concerns(self, case: str) -> bool:
        """Whether it is one of its cases."""
        return any(fnmatchcase(case, pattern) for pattern in self.cases)

    def shows(self, found: object) -> bool:
        """Whether that, which was not promised, is what it makes of a case."""
        return not self.says or (isinstance(found, str) and self.says in found)


_MOVED = "test_every_dtype_is_moved_bit_by_bit"
_REDUCED = "test_every_dtype_is_reduced_by_every_reduction_that_nccl_has_for_it"
_REFUSED = "test_dtypes_that_nccl_has_not_are_refused_and_the_group_stays_usable"
_LATE = "test_a_result_is_there_when_its_work_or_its_future_was_waited_for"

_OPEN: Final = (
    "a refused call leaves `ncclGroupStart` without its `ncclGroupEnd`, and whatever "
    "comes later in this thread never runs: uneven `all_gather` and `reduce_scatter`, "
    "`all_to_all`, `scatter`, `send`, `batch_isend_irecv`"
)

# docs/conformance.md has a row for each reason.
FAULTS: Final[tuple[Fault, ...]] = (
    *(
        Fault(
            backend,
            f"{_MOVED}[{operation}]",
            "`gather` refuses complex numbers: `torch.distributed` views them as real "
            "ones for every other collective that moves, and NCCL has no such type",
            cases=("gather* complex*",),
            says=says,
        )
        for backend, operation, says in (
            ("nccl", "gather", "Unconvertible NCCL type Complex"),
            ("nccl", "gather_single", "not supported for NCCL process group: Complex"),
            ("nccl2", "gather", "Unsupported tensor data type for NCCL"),
            ("nccl2", "gather_single", "Unsupported tensor data type for NCCL"),
        )
    ),
    Fault(
        "nccl",
        f"{_REDUCED}[reduce]",
        "`reduce` takes the float8 types that NCCL has not and reduces them as bytes; "
        "the other collectives refuse them",
        cases=tuple(
            f"reduce float8_*fnuz {op} *"
            for op in ("sum", "product", "min", "max", "avg")
        ),
    ),
    *(
        Fault("nccl", f"{_REFUSED}[{operation}]", _OPEN, cases=("all_reduce *",))
        for operation in (
            "all_gather_uneven",
            "all_to_all",
            "all_to_all_uneven",
            "scatter",
            "reduce_scatter_uneven",
            "chain",
            "ring",
        )
    ),
    Fault(
        "nccl",
        "test_what_nccl_cannot_send_is_refused_and_the_group_stays_usable",
        _OPEN,
        cases=("afterwards",),
    ),
    Fault(
        "nccl",
        "test_tensors_that_cannot_be_are_refused_and_the_group_stays_usable",
        "`all_gather` takes a list of too few outputs, and writes past the end of them",
        cases=("too few outputs",),
    ),
    Fault(
        "nccl",
        _LATE,
        "the future of a batch, which an uneven `all_gather` or `reduce_scatter` is, "
        "knows no tensors: waiting for it waits for nothing",
        cases=("all_gather_uneven * future", "reduce_scatter_uneven * future"),
    ),
    Fault(
        "nccl",
        _LATE,
        "`gather` and `scatter` have no future in the ranks that are not the root: it "
        "would hold an undefined tensor",
        cases=("gather * future", "scatter * future"),
        says="UndefinedTensorImpl",
    ),
    Fault(
        "nccl",
        "test_many_tensors_of_each_rank_are_gathered",
        "has no `all_gather_coalesced`",
        cases=("all_gather_coalesced *",),
        says="does not support allgather_coalesced",
    ),
    Fault(
        "nccl",
        "test_a_barrier_is_over_when_all_have_come",
        "`barrier` fills a tensor, and so launches the kernel `FillFunctor<float>`",
        torch=("2.14",),
    ),
    *(
        Fault(
            backend,
            test,
            "torch computes with the sizes of objects on the GPU, and so launches the "
            "kernels `FillFunctor<long>`, `CompareFunctor<long>`, `reduce_kernel` and "
            "`CatArrayBatchedCopy`",
        )
        for backend in BACKENDS
        for test in (
            "test_all_ranks_get_the_objects_of_all",
            "test_a_list_of_objects_goes_from_one_rank_to_all",
            "test_one_rank_gets_the_objects_of_all",
            "test_each_rank_gets_an_object_of_its_own",
            "test_a_list_of_objects_is_sent",
        )
    ),
    Fault(
        "nccl2",
        "test_a_put_of_nothing_is_a_signal",
        "`put` looks for the address of its source among the windows, and a tensor "
        "without elements has none",
    ),
    Fault(
        "nccl2",
        "test_a_target_makes_no_call[2.30.7]",
        "in NCCL 2.30 the first one-sided call is a meeting of all ranks, and none is "
        "made when a window is opened",
    ),
    Fault(
        "nccl2",
        "test_every_generation_has_windows[as it is]",
        "the communicators are nonblocking, and the window is taken before NCCL is "
        "through: `ncclCommWindowRegister` returns success at once then",
    ),
    Fault(
        "nccl2",
        "test_a_group_to_be_formed_may_be_bound_to_a_device",
        "a group with a device is connected at once, which one to be formed refuses",
        torch=("2.14",),
    ),
    Fault(
        "nccl2",
        "test_work_outlives_its_aborted_group",
        "work refers to its group without keeping it: freed memory is read",
    ),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """What the tests ask of a backend otherwise than of torch's, and it passes."""

    backend: str
    tests: tuple[str, ...]
    reason: str
    torch: tuple[str, ...] = ("2.14", "2.15")


DIFFERENCES: Final[tuple[Difference, ...]] = (
    Difference(
        "weightsync-nccl2",
        (_REDUCED,),
        "`reduce_scatter` sums and averages complex numbers, which torch's backends "
        "refuse there",
    ),
    Difference(
        "weightsync-nccl2",
        ("test_many_tensors_of_each_rank_are_gathered",),
        "`all_gather_coalesced` takes a list of outputs for each rank, as torch "
        "documents it, and torch's `nccl2` one for each input",
    ),
    Difference(
        "weightsync-nccl2",
        (
            "test_a_process_ends_when_nobody_answers_in_time",
            "test_a_process_goes_on_when_nobody_answers_in_time",
            "test_nothing_ends_where_errors_are_not_handled",
        ),
        "the process goes on and later calls raise, whatever torch's variables say",
    ),
)


Cases = Mapping[str, object]
"""What is promised or was found in a rank, by the name of the case."""


def deviations(
    faults: Sequence[Fault], promised: Sequence[Cases], found: Sequence[Cases]
) -> dict[str, str]:
    """Return what is not as promised, and no fault, and the faults that are gone.

    Both sequences are by rank. A fault may show in some of the ranks only.
    """
    names = dict.fromkeys(name for cases in [*promised, *found] for name in cases)
    wrong = {name: _wrong(name, promised, found) for name in names}
    unknown = {
        name: f"rank {rank}: {_text(promised[rank].get(name))} was promised, "
        f"{_text(answer)} was found"
        for name, answers in wrong.items()
        for rank, answer in answers.items()
        if not any(fault.concerns(name) and fault.shows(answer) for fault in faults)
    }
    gone = {
        name: f"is as promised, in spite of: {fault.reason}"
        for fault in faults
        for name in filter(fault.concerns, names)
        if not wrong[name]
    }
    return unknown | gone


def _wrong(
    name: str, promised: Sequence[Cases], found: Sequence[Cases]
) -> dict[int, object]:
    """What was not promised, by rank."""
    return {
        rank: theirs.get(name)
        for rank, (ours, theirs) in enumerate(zip(promised, found, strict=True))
        if ours.get(name) != theirs.get(name)
    }


def _text(answer: object) -> str:
    return answer.hex(" ", 8)[:200] if isinstance(answer, bytes) else repr(answer)
