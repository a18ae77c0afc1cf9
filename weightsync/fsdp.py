"""Memory in which FSDP2 keeps gathered copies of sharded parameters for a while."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class Copies:
    """The gathered copies that modules of this process have at the moment.

    Between a forward and the next reshard they are what ``named_parameters()`` gives.
    An optimizer changes the sharded parameters only, so a copy that outlives a step is
    older than they are, and nothing at the copy itself tells.
    """

    def __init__(self) -> None:
        self._storages: set[int] = set()
        self._meshes: dict[int, object] = {}
        for group in _groups():
            self._add(group)

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return bool(self._storages or self._meshes)

    def have(self, tensor: Tensor, mesh: object = None) -> bool:
        """Whether a tensor, or the local one of a DTensor on a mesh, is one of them."""
        if self._meshes.get(id(mesh)) is not None:
            return True
        return tensor.untyped_storage().data_ptr() in self._storages

    def _add(self, group: Any) -> None:
        resharded = group.post_forward_mesh_info
        if resharded is not None and resharded is not group.mesh_info:
            # Only parameters that are resharded to fewer ranks are on such a mesh.
            self._meshes[id(resharded.mesh)] = resharded.mesh
        if group.is_unsharded:
            for parameter in group.fsdp_params:
                gathered = parameter.all_gather_outputs
                made = parameter._unsharded_inner_tensors
                for tensor in (*gathered, *made):
                    if tensor.numel():
                        self._storages.add(tensor.untyped_storage().data_ptr())


def _groups() -> Iterator[Any]:
    """What FSDP knows of its parameters, in groups. It tells so by nothing public."""
    states = sys.modules.get("torch.distributed._composable_state")
    if states is None:
        return
    for reference in list(states._module_state_mapping.values()):
        yield from getattr(reference(), "_fsdp_param_groups", ())
