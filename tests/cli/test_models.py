"""Models: the same tensors from each kind of file, and what is refused."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from weightsync.cli import main
from weightsync.cli.models import ModelTensor, read_model
from weightsync.errors import PlanError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {
    "a.weight": torch.zeros(2, 3, dtype=torch.bfloat16),
    "b": torch.zeros((), dtype=torch.float8_e4m3fn),
    "c": torch.zeros(0, 4, dtype=torch.int64),
}
FOUND = {
    ModelTensor("a.weight", "bfloat16", (2, 3)),
    ModelTensor("b", "float8_e4m3fn", ()),
    ModelTensor("c", "int64", (0, 4)),
}


def _index(folder: Path) -> Path:
    names = list(TENSORS)
    files = {"one.safetensors": names[:2], "two.safetensors": names[2:]}
    for file, held in files.items():
        save_file({name: TENSORS[name] for name in held}, folder / file)
    path = folder / "model.safetensors.index.json"
    weight_map = {name: file for file, held in files.items() for name in held}
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_a_safetensors_file_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "m.safetensors")

    assert set(read_model(tmp_path / "m.safetensors")) == FOUND


def test_a_safetensors_index_is_read_in_its_order(tmp_path: Path) -> None:
    found = read_model(_index(tmp_path))

    assert list(TENSORS) == [tensor.name for tensor in found]
    assert set(found) == FOUND


def test_a_folder_is_read_by_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    _index(tmp_path)

    assert FOUND == set(read_model(tmp_path))


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_table_is_read(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"m{suffix}"
    if suffix == ".toml":
        rows = [
            f'"{t.name}" = {{ dtype = "{t.dtype}", shape = {list(t.shape)} }}'
            for t in FOUND
        ]
        file.write_text("\n".join(["[tensors]", *rows]))
    else:
        rows = {t.name: {"dtype": t.dtype, "shape": t.shape} for t in FOUND}
        file.write_text(json.dumps({"tensors": rows}))

    assert FOUND == set(read_model(file))


def test_a_config_is_built_without_memory(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 1 << 16,
        "head_dim": 128,
        "intermediate_size": 1 << 18,
        "num_attention_heads": 512,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "vocab_size": 1 << 20,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = {tensor.name: tensor for tensor in read_model(tmp_path)}

    embedding = ModelTensor("model.embed_tokens.weight", "bfloat16", (1 << 20, 1 << 16))
    assert embedding == found["model.embed_tokens.weight"]
    assert embedding.name == found["lm_head.weight"].tied
    assert 0 == found["lm_head.weight"].nbytes
    key = found["model.layers.1.self_attn.k_proj.weight"]
    assert (1024, 1 << 16) == key.shape


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("m.bin", "", "a model is read from a folder, .json, .toml or .safetensors"),
        ("m.json", "{", "m.json: is no JSON"),
        ("m.json", "[]", "m.json: holds a list, not a table of keys"),
        ("m.json", "{}", "m.json: has none of the keys weight_map"),
        ("m.toml", "a = 1", "m.toml: tensors is None, but must be a table of names"),
        ("m.toml", "b = 1\n[tensors]", "m.toml: there is no key 'b'"),
        ("m.toml", "[tensors]\na = 1", "m.toml: tensors.'a' is 1, but must be a table"),
        (
            "m.toml",
            '[tensors]\na = { dtype = "int8", shape = [-1] }',
            "m.toml: tensors.'a'.shape is [-1], but must be a list of sizes",
        ),
        (
            "m.toml",
            '[tensors]\na = { dtype = "bf16", shape = [] }',
            "m.toml: tensors.'a'.dtype is 'bf16', but must be one of torch's dtypes",
        ),
        ("m.json", '{"weight_map": 3}', "m.json: weight_map must map names"),
        (
            "m.json",
            '{"weight_map": {"a": "gone.safetensors"}}',
            "gone.safetensors: cannot be read",
        ),
        ("m.safetensors", "no header", "m.safetensors: cannot be read"),
        (
            "m.json",
            '{"model_type": "kimi_k2"}',
            "m.json: transformers cannot build it: ValueError",
        ),
        (
            "m.json",
            '{"model_type": "vit"}',
            "m.json: transformers cannot build it: ValueError",
        ),
    ],
)
def test_what_is_no_model_is_refused_by_file_key_and_value(
    file: str, text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(PlanError) as caught:
        read_model(tmp_path / file)

    assert said in str(caught.value)


def test_an_index_of_tensors_that_are_not_there_is_refused(tmp_path: Path) -> None:
    path = _index(tmp_path)
    path.write_text(path.read_text().replace('"b"', '"d"'))
    with pytest.raises(PlanError, match=r"weight_map says 'd' is in one\.safetens"):
        read_model(path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="holds none of "):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("package", "file", "said"),
    [
        ("safetensors", "m.safetensors", "pip install 'weightsync"),
        ("transformers", "config.json", "pip install transformers"),
    ],
)
def test_a_missing_package_is_an_error_that_says_what_to_install(
    package: str, file: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(TENSORS, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedError, match=said):
        read_model(tmp_path / file)


def test_a_missing_package_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(TENSORS, tmp_path / "m.safetensors")
    (tmp_path / "l.toml").write_text("[mesh]\ntp = 1")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.chdir(tmp_path)

    assert 1 == main(["plan", "l.toml", "l.toml", "--model", "m.safetensors"])
