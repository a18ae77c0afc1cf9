"""The file that says how one side places tensors on its mesh: TOML in, rules out."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from weightsync.errors import PlanError
from weightsync.spec import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

MAX_RANKS: Final = 4096
"""So many ranks a job or a replica may have."""

RULE_KEYS: Final = ("names", "shard", "assign", "only", "dtype")

_FIELD: Final = re.compile(r"<([A-Za-z_]\w*)>")
_TOKEN: Final = re.compile(r"(<[A-Za-z_]\w*>|\*|\?)")


@dataclass(frozen=True, slots=True)
class Cut:
    """One step of cutting a tensor: along ``dim``, over the ranks of mesh dims.

    Several mesh dims count as one dim, the first of them outermost.
    """

    over: tuple[str, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which coordinates of a mesh dim hold which numbers of a field of the names.

    ``sizes`` says how many numbers each coordinate takes; without it they are split as
    ``torch.chunk`` splits.
    """

    over: str
    field: str
    sizes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Rule:
    """How the tensors whose names match are placed.

    ``where`` is the place of the rule in its file, for messages. ``only`` maps a mesh
    dim to the coordinates that hold the tensors. Mesh dims that occur nowhere hold
    copies, numbered along the ``copied`` dims and the coordinates that they have.
    """

    where: str
    patterns: tuple[re.Pattern[str], ...]
    cuts: tuple[Cut, ...]
    assignments: tuple[Assignment, ...]
    only: Mapping[str, tuple[int, ...]]
    copied: Mapping[str, tuple[int, ...]]
    dtype: str | None

    def match(self, name: str) -> dict[str, int] | None:
        """Return the numbers in the fields of a name, None where it does not match."""
        for pattern in self.patterns:
            found = pattern.fullmatch(name)
            if found is not None:
                return {key: int(text) for key, text in found.groupdict().items()}
        return None


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh, its sizes by name, outermost first; and rules, of which the first counts.

    ``source`` names the file in messages. The last rule matches every name.
    """

    source: str
    mesh: Mapping[str, int]
    rules: tuple[Rule, ...]

    @property
    def ranks(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.mesh.values())


def read_layout(path: Path) -> Layout:
    """Read a file; raises PlanError that names the file, the key and the value."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"{path}: is no TOML: {error}") from error
    return make_layout(data, str(path))


def make_layout(data: Mapping[str, Any], source: str) -> Layout:
    """Build it from what the file holds; raises what ``read_layout`` raises."""
    _check_keys(data, ("mesh", "tensors"), source)
    mesh = _mesh(data.get("mesh"), f"{source}: mesh")
    tables = data.get("tensors", [])
    if not isinstance(tables, list):
        raise _fault(f"{source}: tensors", tables, "a list of tables, [[tensors]]")
    rules = [
        _rule(table, mesh, f"{source}: tensors[{index}]")
        for index, table in enumerate(tables)
    ]
    rest = _rule({"names": "*"}, mesh, source)
    return Layout(source, mesh, (*rules, rest))


def _fault(where: str, value: object, wanted: str) -> PlanError:
    return PlanError(f"{where} is {value!r}, but must be {wanted}")


def _check_keys(
    table: Mapping[str, object], known: tuple[str, ...], where: str
) -> None:
    for key in table:
        if key not in known:
            raise PlanError(
                f"{where}: there is no key {key!r}; the keys are {', '.join(known)}"
            )


def _table(value: object, where: str, holds: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _fault(where, value, f"a table of {holds}")
    return value


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# The mesh


def _mesh(value: object, where: str) -> dict[str, int]:
    if value is None:
        raise PlanError(f"{where} is missing; it is a table such as {{ dp = 4 }}")
    mesh = _table(value, where, "names and sizes")
    for name, size in mesh.items():
        if not name.isidentifier():
            raise PlanError(
                f"{where} has a dim {name!r}; a name has letters, digits and _"
            )
        if not _is_count(size, 1):
            raise _fault(f"{where}.{name}", size, "a whole number of at least 1")
    if not mesh:
        raise _fault(where, mesh, "a table with at least one dim")
    if math.prod(mesh.values()) > MAX_RANKS:
        ranks = math.prod(mesh.values())
        raise PlanError(f"{where} has {ranks} ranks; at most {MAX_RANKS} are supported")
    return mesh


# Rules


def _rule(value: object, mesh: Mapping[str, int], where: str) -> Rule:
    table = _table(value, where, f"the keys {', '.join(RULE_KEYS)}")
    _check_keys(table, RULE_KEYS, where)
    patterns = tuple(_patterns(table.get("names"), f"{where}.names"))
    cuts = tuple(_cuts(table.get("shard", {}), mesh, f"{where}.shard"))
    assigned = table.get("assign", {})
    assignments = tuple(_assignments(assigned, mesh, f"{where}.assign"))
    only = dict(_only(table.get("only", {}), mesh, f"{where}.only"))
    dtype = table.get("dtype")
    if dtype is not None and dtype not in ITEMSIZE:
        raise _fault(f"{where}.dtype", dtype, "a torch dtype such as 'bfloat16'")
    _check_dims_once(cuts, assignments, only, where)
    _check_fields(patterns, assignments, where)
    copied = _copied(cuts, assignments, only, mesh)
    return Rule(where, patterns, cuts, assignments, only, copied, dtype)


def _patterns(value: object, where: str) -> Iterator[re.Pattern[str]]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise _fault(where, value, "a pattern or a list of patterns")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _fault(where, text, "a pattern such as 'model.layers.*'")
        fields = _FIELD.findall(text)
        if len(set(fields)) < len(fields):
            raise _fault(where, text, "a pattern that names each field once")
        yield re.compile("".join(map(_expression, _TOKEN.split(text))))


def _expression(token: str) -> str:
    if token in ("*", "?"):
        return {"*": ".*", "?": "."}[token]
    if _FIELD.fullmatch(token):
        return rf"(?P{token}\d+)"
    return re.escape(token)


def _cuts(value: object, mesh: Mapping[str, int], where: str) -> Iterator[Cut]:
    for key, dim in _table(value, where, "mesh dims and tensor dims").items():
        over = tuple(key.split("+"))
        for name in over:
            _check_dim(name, mesh, where)
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise _fault(f"{where}.{key}", dim, "the number of a tensor dim")
        yield Cut(over, dim)


def _check_dim(name: str, mesh: Mapping[str, int], where: str) -> None:
    if name not in mesh:
        raise PlanError(
            f"{where}: there is no mesh dim {name!r}; the mesh has {', '.join(mesh)}"
        )


def _assignments(
    value: object, mesh: Mapping[str, int], where: str
) -> Iterator[Assignment]:
    for name, given in _table(value, where, "mesh dims and fields").items():
        _check_dim(name, mesh, where)
        wanted = f"a field such as {name!r}, or a table with field and sizes"
        if isinstance(given, str):
            yield Assignment(name, given, None)
            continue
        table = _table(given, f"{where}.{name}", "field and sizes")
        _check_keys(table, ("field", "sizes"), f"{where}.{name}")
        if not isinstance(table.get("field"), str):
            raise _fault(f"{where}.{name}", given, wanted)
        sizes = table.get("sizes")
        if sizes is not None:
            sizes = _sizes(sizes, mesh[name], f"{where}.{name}.sizes")
        yield Assignment(name, table["field"], sizes)


def _sizes(value: object, count: int, where: str) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) != count
        or not all(_is_count(size) for size in value)
    ):
        raise _fault(where, value, f"a list of {count} whole numbers")
    return tuple(value)


def _only(
    value: object, mesh: Mapping[str, int], where: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, given in _table(value, where, "mesh dims and coordinates").items():
        _check_dim(name, mesh, where)
        coordinates = given if isinstance(given, list) else [given]
        inside = all(_is_count(at) and at < mesh[name] for at in coordinates)
        if not inside or not 0 < len(set(coordinates)) == len(coordinates):
            wanted = f"different coordinates from 0 to {mesh[name] - 1}"
            raise _fault(f"{where}.{name}", given, wanted)
        yield name, tuple(coordinates)


def _check_dims_once(
    cuts: Sequence[Cut],
    assignments: Sequence[Assignment],
    only: Mapping[str, object],
    where: str,
) -> None:
    used = [name for cut in cuts for name in cut.over]
    used += [*[each.over for each in assignments], *only]
    for name in used:
        if used.count(name) > 1:
            raise PlanError(f"{where}: mesh dim {name!r} is used twice")


def _check_fields(
    patterns: Sequence[re.Pattern[str]], assignments: Sequence[Assignment], where: str
) -> None:
    for each in assignments:
        if not all(each.field in pattern.groupindex for pattern in patterns):
            raise PlanError(
                f"{where}.assign.{each.over} is {each.field!r}, but not every pattern "
                f"of names has the field <{each.field}>"
            )


def _copied(
    cuts: Sequence[Cut],
    assignments: Sequence[Assignment],
    only: Mapping[str, tuple[int, ...]],
    mesh: Mapping[str, int],
) -> dict[str, tuple[int, ...]]:
    divided = {name for cut in cuts for name in cut.over}
    divided.update([each.over for each in assignments])
    return {
        name: only.get(name, tuple(range(size)))
        for name, size in mesh.items()
        if name not in divided
    }
