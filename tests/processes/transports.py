"""Which tests of the transport run on which engine, and when.

Every test of the files below runs over shared memory, and with the same body over
emulated NCCL: a few in every run of the suite, the others where `slow` tests run.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from weightsync import testing

FILES: Final = tuple(
    f"test_{name}"
    for name in (
        *("agreement", "exact", "faults", "input", "layouts", "leases", "leftovers"),
        *("liveness", "membership", "modes", "versions"),
    )
)
"""How the names of the files begin."""

ALWAYS: Final = frozenset(
    {
        "test_a_fault_of_one_rank_is_raised_on_every_rank",
        "test_a_module_computes_with_each_version_without_rebinding",
        "test_a_push_keeps_what_the_caller_dropped",
        "test_a_real_model_in_shards_fills_the_fused_tensors_of_engines",
        "test_a_source_may_change_as_soon_as_push_has_returned",
        "test_a_stopped_generator_fails_alone_within_the_timeout",
        "test_a_tensor_parallel_engine_receives_into_its_dtensors",
        "test_a_thousand_tensors_need_few_descriptors",
        "test_different_values_for_one_storage_are_refused",
        "test_many_pushes_leave_nothing",
        "test_one_push_fills_replicas_of_every_layout",
        "test_replicated_fsdp_sends_every_byte_once",
        "test_rows_that_one_rank_fails_to_push_are_named_on_every_rank",
        "test_shards_of_two_trainers_arrive_in_strided_parts_of_larger_buffers",
        "test_strided_fused_and_tied_destinations_share_a_job",
        "test_what_waits_for_a_lease_says_so_when_it_times_out",
    }
)
"""What runs over NCCL in every run: what differs most between the engines."""

HOST: Final[dict[str, str]] = {
    "test_exact_cast_memory": "measures memory of the host",
    "test_exact_cast_stopped": "stops the batches of shared memory",
    "test_exact_many": "compares times, which mean nothing on the emulator",
    "test_a_small_view_of_a_large_storage_costs_what_it_shows": "counts shared memory",
    "test_both_storages_of_one_memory_see_each_version": "of an array of NumPy",
    "test_memory_that_becomes_read_only_is_an_error_on_both_sides": "of the host",
    "test_pushing_faster_than_the_reader_reads": "counts shared memory",
    "test_read_only_memory_is_refused_when_it_is_registered": "of the host",
    "test_two_sharded_trainers_send_half_each_and_no_copy_of_the_model": (
        "counts shared memory"
    ),
}
"""What runs over shared memory only, files and single tests, and why."""

KERNELS: Final = frozenset(
    {
        "test_a_destination_that_was_freed_fails_by_name_and_not_by_a_signal",
        "test_a_hundred_pushes_leave_the_source_as_it_was",
        "test_a_channels_last_source_arrives_with_its_logical_values",
        "test_a_source_that_becomes_lazy_is_not_taken_for_the_one_before",
        "test_a_source_whose_strides_change_is_captured_again",
        "test_a_strided_destination_gets_the_very_bits",
        "test_a_strided_destination_is_filled_and_nothing_beside_it",
        "test_a_strided_source_arrives_in_its_logical_order",
        "test_columns_of_one_buffer_are_filled_in_every_mode",
        "test_dtensors_over_slices_of_a_larger_tensor_arrive_exactly",
        "test_exact_cast",
        "test_lazily_conjugated_and_negated_sources_arrive_resolved",
        "test_padded_columns_keep_their_padding",
        "test_partial_pushes_keep_strided_neighbours",
        "test_sharded_trainers_fill_strided_pieces_inside_larger_buffers",
        "test_strided_fused_and_tied_destinations_share_a_job",
    }
)
"""Where torch launches kernels for weightsync, files and single tests.

Those are of tensors that are not contiguous, and of casts. The CPU computes these for
the emulator. On a GPU they are tests marked `gpu`.
"""


def parameters(file: str, test: str) -> list[Any]:
    """Return the engines that a test runs on."""
    found: list[Any] = ["shm"]
    if not file.startswith(FILES):
        return found
    if not HOST.keys() & {file, test}:
        marks = [testing.requires_emulator()]
        if test not in ALWAYS:
            marks.append(pytest.mark.slow)
        found.append(pytest.param("nccl", marks=marks))
    if KERNELS & {file, test}:
        found.append(pytest.param("gpu", marks=pytest.mark.gpu))
    return found
