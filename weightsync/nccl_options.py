"""The options of a group on NCCL: ours, or torch's own where they say the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch.distributed import constants

from weightsync.errors import PlanError, UnsupportedError

if TYPE_CHECKING:
    from datetime import timedelta

    from weightsync._C import NcclOptions

_UNDEFINED: Final = -(2**31)
"""What NCCL calls an integer that nobody set."""

_INTEGERS: Final = (
    "cga_cluster_size",
    "min_ctas",
    "max_ctas",
    "cta_policy",
    "split_share",
    "shrink_share",
    "traffic_class",
    "collnet_enable",
    "nvls_ctas",
    "n_channels_per_net_peer",
    "nvlink_centric_sched",
)
_TEXTS: Final = ("net_name", "comm_name")

_COMMON: Final = (
    "group_name",
    "global_ranks_in_group",
    "enable_reconfigure",
    "is_high_priority_stream",
)

_MEANINGLESS: Final = {
    "split_from": "use torch.distributed.split_group",
    "lazy_init": "a group without device_id is connected at its first operation",
}
"""Fields of torch's options that mean nothing here, and what does the same."""


def options_from(given: object, kind: type[NcclOptions]) -> NcclOptions:
    """Return a copy of the options as one of ours, of the class ``kind``.

    Raises PlanError for an object of another kind, UnsupportedError for a field of
    torch's options that has no meaning here.
    """
    if given is None:
        return kind()
    if isinstance(given, kind):
        return given.clone()
    if type(given).__qualname__.endswith("NCCL.Options") and hasattr(given, "config"):
        return _translated(given, kind)
    raise PlanError(
        "the options of a group on NCCL are a weightsync.backend.NcclOptions or "
        f"torch's ProcessGroupNCCL.Options; found a {type(given).__name__}"
    )


def choose_timeout(asked: timedelta, optional: timedelta) -> timedelta:
    """Return the timeout of a group that was given one by call and one by options.

    Raises PlanError where both were given and differ.
    """
    unset = (constants.default_pg_timeout, constants.default_pg_nccl_timeout)
    if optional in unset or optional == asked:
        return asked
    if asked in unset:
        return optional
    raise PlanError(
        f"the process group was given two timeouts: {asked.total_seconds():g} s by its "
        f"call, {optional.total_seconds():g} s by its options"
    )


def _translated(given: Any, kind: type[NcclOptions]) -> NcclOptions:
    for name, instead in _MEANINGLESS.items():
        if getattr(given, name, None):
            raise UnsupportedError(f"options.{name} has no meaning here: {instead}")
    made = kind(given._timeout)
    for name in _COMMON:
        setattr(made, name, getattr(given, name))
    _translate_config(given.config, made.config)
    return made


def _translate_config(given: Any, made: Any) -> None:
    fields = [name for name in dir(given) if not name.startswith("_")]
    for name in fields:
        value = getattr(given, name)
        if callable(value) or value in (None, "", _UNDEFINED):
            continue
        if name in _INTEGERS or name in _TEXTS:
            setattr(made, name, value)
        elif name != "blocking" or value != 1:
            raise UnsupportedError(
                f"options.config.{name} is {value!r}, which has no meaning here"
                + (": communicators are blocking" if name == "blocking" else "")
            )
