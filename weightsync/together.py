"""The manifests of several ranks as they travel: what ranks list alike stands once."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from weightsync.errors import ProtocolError

# At run time too: what travels is decoded by these types.
from weightsync.spec import Kind, Manifest, validate_manifest

if TYPE_CHECKING:
    from collections.abc import Iterable


class Listed(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """A manifest: a table by its number, and the kinds that are the rank's own."""

    table: int
    kinds: tuple[Kind, ...]


class Together(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True
):
    """Manifests by rank. A table is a manifest without kinds, and for several ranks.

    Ranks that hold other boxes of the same tensors share a table. So a thousand ranks
    take not much more than one of each group, on the wire and in memory.
    """

    tables: tuple[Manifest, ...] = ()
    ranks: tuple[Listed, ...] = ()

    @classmethod
    def of(cls, manifests: Iterable[Manifest]) -> Together:
        """Find what manifests have in common."""
        tables: dict[Manifest, int] = {}
        ranks = [
            Listed(
                tables.setdefault(replace(manifest, kinds=()), len(tables)),
                manifest.kinds,
            )
            for manifest in manifests
        ]
        return cls(tuple(tables), tuple(ranks))

    def __post_init__(self) -> None:
        """Raise ValueError for a table that has kinds, or is not there."""
        for number, table in enumerate(self.tables):
            if table.kinds:
                raise ValueError(f"table {number} has kinds of its own")
        known = range(len(self.tables))
        for rank, listed in enumerate(self.ranks):
            if listed.table not in known:
                raise ValueError(
                    f"rank {rank} has table {listed.table} of {len(self.tables)}"
                )

    @cached_property
    def manifests(self) -> tuple[Manifest, ...]:
        """The manifests by rank; those of one table share its names and the rest."""
        return tuple(
            [
                replace(self.tables[listed.table], kinds=listed.kinds)
                for listed in self.ranks
            ]
        )


def validate_together(together: Together) -> None:
    """Check every manifest as ``validate_manifest`` does; ProtocolError names a rank.

    Where pieces lie is checked once for ranks of one table with boxes of the same size.
    """
    good: set[tuple[object, ...]] = set()
    rows = zip(together.ranks, together.manifests, strict=True)
    for rank, (listed, manifest) in enumerate(rows):
        sizes = [(kind.dtype, kind.box.sizes) for kind in listed.kinds]
        alike = (listed.table, *sizes)
        try:
            validate_manifest(manifest, columns=alike not in good)
        except ProtocolError as error:
            raise ProtocolError(f"rank {rank}: {error}") from error
        good.add(alike)
