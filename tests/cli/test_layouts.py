"""Layout files: what ranks hold, and what is refused."""

from __future__ import annotations

import math
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.boxes import overlapping
from weightsync.cli.layouts import make_layout, read_layout
from weightsync.cli.models import ModelTensor
from weightsync.cli.placing import place
from weightsync.errors import PlanError

if TYPE_CHECKING:
    from pathlib import Path

    from weightsync.spec import Box, Manifest

MOE = [
    ModelTensor("embed", "bfloat16", (8, 2)),
    *[
        ModelTensor(f"layers.{layer}.{name}", "bfloat16", (8, 2))
        for layer in range(3)
        for name in ("norm", "experts.0.up", "experts.1.up", "experts.2.up")
    ],
]


def _place(text: str, *model: ModelTensor) -> tuple[Manifest, ...]:
    return place(make_layout(tomllib.loads(text), "l.toml"), model or MOE).manifests


def _names(text: str) -> list[tuple[str, ...]]:
    return [manifest.names for manifest in _place(text)]


def _boxes(text: str, *shape: int) -> list[str]:
    manifests = _place(text, ModelTensor("w", "bfloat16", shape))
    return [str(manifest.tensors[0].box) for manifest in manifests]


def test_the_last_dim_of_the_mesh_varies_fastest() -> None:
    text = '[mesh]\ndp = 2\ntp = 2\n[[tensors]]\nnames = "w"\nshard = { %s }'

    assert ["[0:4]", "[0:4]", "[4:8]", "[4:8]"] == _boxes(text % "dp = 0", 8)
    assert ["[0:4]", "[4:8]", "[0:4]", "[4:8]"] == _boxes(text % "tp = 0", 8)


def test_mesh_dims_cut_in_the_order_in_which_they_are_written() -> None:
    text = '[mesh]\ndp = 2\ntp = 2\n[[tensors]]\nnames = "w"\nshard = { %s }'

    assert ["[0:2]", "[2:4]", "[4:6]", "[6:8]"] == _boxes(text % "dp = 0, tp = 0", 8)
    assert ["[0:2]", "[4:6]", "[2:4]", "[6:8]"] == _boxes(text % "tp = 0, dp = 0", 8)
    assert ["[0:4, 0:1]", "[0:4, 1:2]", "[4:8, 0:1]", "[4:8, 1:2]"] == _boxes(
        text % "tp = -1, dp = 0", 8, 2
    )


def test_mesh_dims_may_cut_as_one() -> None:
    text = '[mesh]\ndp = 2\ntp = 3\n[[tensors]]\nnames = "w"\nshard = { %s }'

    # 7 elements in 6 pieces are 2 for each, until there are none left.
    assert ["[0:2]", "[2:4]", "[4:6]", "[6:7]", "[7:7]", "[7:7]"] == _boxes(
        text % '"dp+tp" = 0', 7
    )
    # In 2 pieces they are 4 and 3, and each of these in 3 pieces 2, 2, 0 and 1, 1, 1.
    assert ["[0:2]", "[2:4]", "[7:7]", "[4:5]", "[5:6]", "[6:7]"] == [
        box.replace("[4:4]", "[7:7]") for box in _boxes(text % "dp = 0, tp = 0", 7)
    ]


def test_ranks_hold_copies_along_the_other_dims() -> None:
    manifests = _place(
        "[mesh]\na = 2\nb = 2\nc = 2\n"
        '[[tensors]]\nnames = "w"\nshard = { b = 0 }\n'
        '[[tensors]]\nnames = "v"\nonly = { a = [1], c = [0, 1] }',
        *[ModelTensor(name, "bfloat16", (4,)) for name in ("w", "v", "u")],
    )
    copies = [{t.name: t.replica for t in m.tensors} for m in manifests]

    assert [0, 1, 0, 1, 2, 3, 2, 3] == [each["w"] for each in copies]
    assert [0, 1, 2, 3] == [each["v"] for each in copies if "v" in each]
    assert list(range(8)) == [each["u"] for each in copies]


def test_experts_and_stages_are_spread_evenly() -> None:
    names = _names(
        "[mesh]\npp = 2\nep = 2\n"
        '[[tensors]]\nnames = "layers.<layer>.experts.<expert>.*"\n'
        'assign = { pp = "layer", ep = "expert" }\n'
        '[[tensors]]\nnames = "layers.<layer>.*"\nassign = { pp = "layer" }\n'
        '[[tensors]]\nnames = "embed"\nonly = { pp = 0 }\n'
    )

    # 3 layers in 2 stages are 2 and 1; 3 experts on 2 coordinates are 2 and 1.
    assert (
        *("embed", "layers.0.norm", "layers.0.experts.0.up", "layers.0.experts.1.up"),
        *("layers.1.norm", "layers.1.experts.0.up", "layers.1.experts.1.up"),
    ) == names[0]
    assert (
        *("embed", "layers.0.norm", "layers.0.experts.2.up"),
        *("layers.1.norm", "layers.1.experts.2.up"),
    ) == names[1]
    assert ("layers.2.norm", "layers.2.experts.2.up") == names[3]


def test_stages_may_have_sizes_of_their_own() -> None:
    names = _names(
        "[mesh]\npp = 3\n"
        '[[tensors]]\nnames = "layers.<layer>.*"\n'
        'assign = { pp = { field = "layer", sizes = [0, 1, 2] } }\n'
        '[[tensors]]\nnames = "*"\nonly = { pp = 0 }'
    )

    assert ("embed",) == names[0]
    assert {"layers.0"} == {name[:8] for name in names[1]}
    assert {"layers.1", "layers.2"} == {name[:8] for name in names[2]}


def test_the_first_rule_counts_and_the_rest_is_whole() -> None:
    manifests = _place(
        '[mesh]\ntp = 2\n[[tensors]]\nnames = ["a?", "b.*"]\nshard = { tp = 0 }\n'
        '[[tensors]]\nnames = "a*"\nshard = { tp = 1 }',
        *[ModelTensor(name, "int8", (4, 4)) for name in ("a1", "a12", "b", "b.c.d")],
    )

    assert {
        "a1": "[2:4, 0:4]",
        "a12": "[0:4, 2:4]",
        "b": "[0:4, 0:4]",
        "b.c.d": "[2:4, 0:4]",
    } == {tensor.name: str(tensor.box) for tensor in manifests[1].tensors}


def test_a_dtype_of_a_side_takes_the_place_of_the_models() -> None:
    (manifest,) = _place('[mesh]\ntp = 1\n[[tensors]]\nnames="*"\ndtype="float32"')

    assert {"float32"} == {tensor.dtype for tensor in manifest.tensors}


def test_tied_tensors_stay_tied_where_they_are_cut_alike() -> None:
    model = [
        ModelTensor("embed", "int8", (4, 4)),
        ModelTensor("head", "int8", (4, 4), tied="embed"),
    ]
    text = '[mesh]\ntp = 2\n[[tensors]]\nnames = "embed"\nshard = { tp = 0 }\n'
    alike = _place(text.replace('"embed"', '"*"'), *model)
    by_two_rules = _place(text + text[13:].replace("embed", "head"), *model)
    unlike = _place(text, *model)
    apart = _place('[mesh]\npp = 2\n[[tensors]]\nnames="head"\nonly={pp=1}', *model)

    assert [((1, 0),)] * 2 == [manifest.ties for manifest in alike]
    assert [((1, 0),)] * 2 == [manifest.ties for manifest in by_two_rules]
    assert [()] * 2 == [manifest.ties for manifest in unlike]
    assert [(), ((1, 0),)] == [manifest.ties for manifest in apart]


@given(
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    data=st.data(),
)
def test_each_copy_is_cut_without_gaps_or_overlaps(
    mesh: list[int], shape: list[int], data: st.DataObject
) -> None:
    names = [f"d{index}" for index in range(len(mesh))]
    cutting = data.draw(st.permutations(names))[: data.draw(st.integers(0, len(mesh)))]
    dims = st.integers(0, len(shape) - 1)
    rule = {"names": "w", "shard": {name: data.draw(dims) for name in cutting}}
    file = {"mesh": dict(zip(names, mesh, strict=True)), "tensors": [rule]}
    model = [ModelTensor("w", "int8", tuple(shape))]
    manifests = place(make_layout(file, "file"), model).manifests
    copies: dict[int, list[Box]] = {}
    for manifest in manifests:
        (piece,) = manifest.tensors
        copies.setdefault(piece.replica, []).append(piece.box)

    whole = math.prod(shape)
    apart = [name for name in names if name not in cutting]
    count = math.prod([mesh[names.index(name)] for name in apart])
    assert list(range(count)) == sorted(copies)
    for boxes in copies.values():
        assert whole == sum([box.numel for box in boxes])
        assert overlapping([box for box in boxes if not box.empty]) is None


RULE = "[mesh]\ntp = 2\npp = 2\n[[tensors]]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[mesh", "is no TOML"),
        ("", "mesh is missing"),
        ("[mesh]\n", "mesh is {}, but must be a table with at least one dim"),
        ("[mesh]\ntp = 0", "mesh.tp is 0, but must be a whole number of at least 1"),
        ('[mesh]\ntp = "2"', "mesh.tp is '2', but must be a whole number"),
        ("[mesh]\ntp = true", "mesh.tp is True, but must be a whole number"),
        ('[mesh]\n"a b" = 2', "mesh has a dim 'a b'"),
        ("[mesh]\na = 70\nb = 70", "mesh has 4900 ranks; at most 4096"),
        ("[mesh]\ntp = 2\n[tensor]", "there is no key 'tensor'; the keys are mesh"),
        ("tensors = 3\n[mesh]\ntp = 2", "tensors is 3, but must be a list of tables"),
        ("tensors = [3]\n[mesh]\ntp = 2", "tensors[0] is 3, but must be a table"),
        (RULE + "name = 'x'", "tensors[0]: there is no key 'name'"),
        (RULE, "tensors[0].names is None, but must be a pattern"),
        (RULE + "names = []", "tensors[0].names is [], but must be a pattern"),
        (RULE + "names = [1]", "tensors[0].names is 1, but must be a pattern"),
        (RULE + 'names = "<a>.<a>"', "names is '<a>.<a>', but must be a pattern that"),
        (RULE + 'names = "*"\nshard = 0', "tensors[0].shard is 0, but must be a table"),
        (
            RULE + 'names = "*"\nshard = { dp = 0 }',
            "tensors[0].shard: there is no mesh dim 'dp'; the mesh has tp, pp",
        ),
        (
            RULE + 'names = "*"\nshard = { "tp+dp" = 0 }',
            "tensors[0].shard: there is no mesh dim 'dp'",
        ),
        (
            RULE + 'names = "*"\nshard = { tp = "0" }',
            "tensors[0].shard.tp is '0', but must be the number of a tensor dim",
        ),
        (
            RULE + 'names = "*"\nshard = { tp = 0 }\nonly = { tp = 0 }',
            "tensors[0]: mesh dim 'tp' is used twice",
        ),
        (
            RULE + 'names = "*"\nassign = { pp = "layer" }',
            "tensors[0].assign.pp is 'layer', but not every pattern of names has the",
        ),
        (
            RULE + 'names = "<n>"\nassign = { pp = 3 }',
            "tensors[0].assign.pp is 3, but must be",
        ),
        (
            RULE + 'names = "<n>"\nassign = { pp = { field = "n", sizes = [1] } }',
            "tensors[0].assign.pp.sizes is [1], but must be a list of 2 whole numbers",
        ),
        (
            RULE + 'names = "<n>"\nassign = { pp = { sizes = [1, 2] } }',
            "tensors[0].assign.pp is {'sizes': [1, 2]}, but must be a field",
        ),
        (
            RULE + 'names = "*"\nonly = { pp = 2 }',
            "tensors[0].only.pp is 2, but must be different coordinates from 0 to 1",
        ),
        (
            RULE + 'names = "*"\nonly = { pp = [0, 0] }',
            "tensors[0].only.pp is [0, 0], but must be different coordinates",
        ),
        (
            RULE + 'names = "*"\ndtype = "bf16"',
            "tensors[0].dtype is 'bf16', but must be a torch dtype",
        ),
    ],
)
def test_a_bad_file_is_refused_by_file_key_and_value(
    text: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(PlanError) as caught:
        read_layout(file)

    assert str(caught.value).startswith(f"{file}: ")
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.toml: cannot be read: No such file"):
        read_layout(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            {"shard": {"tp": 2}},
            r"shard cuts dim 2, but 'embed' of shape \(8, 2\) has 2",
        ),
        (
            {
                "names": "layers.<n>.*",
                "assign": {"tp": {"field": "n", "sizes": [1, 1]}},
            },
            r"assign.tp.sizes is \[1, 1\], in total 2, but <n> has the numbers 0 to 2",
        ),
    ],
)
def test_a_rule_that_does_not_fit_the_model_is_refused(
    rule: dict[str, Any], said: str
) -> None:
    layout = make_layout(
        {"mesh": {"tp": 2}, "tensors": [{"names": "*", **rule}]}, "l.toml"
    )
    with pytest.raises(PlanError, match=rf"^l\.toml: tensors\[0\]\.{said}"):
        place(layout, MOE)
