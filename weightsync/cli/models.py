"""Which tensors a model has: names, dtypes and global shapes, in many kinds of file."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from weightsync.errors import PlanError, UnsupportedError
from weightsync.spec import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

INDEX: Final = "model.safetensors.index.json"

IN_FOLDER: Final = (INDEX, "model.safetensors", "config.json")
"""What is looked for in a folder, in this order."""

SAFETENSORS_DTYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One tensor; ``tied`` names the one before it that has the same memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tied: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory; none where it is that of another tensor."""
        if self.tied is not None:
            return 0
        return ITEMSIZE[self.dtype] * math.prod(self.shape)


def read_model(path: Path) -> tuple[ModelTensor, ...]:
    """Read what tensors a model has, without its weights.

    The file is a Hugging Face ``config.json``, a safetensors file or index, or a table
    in TOML or JSON. In a folder the first of ``IN_FOLDER`` is taken.

    Raises PlanError that names the file, the key and the value, and UnsupportedError
    where a package is not installed.
    """
    if path.is_dir():
        path = _in_folder(path)
    if path.suffix == ".safetensors":
        tensors = _of_files(path, [path])
    elif path.suffix == ".toml":
        tensors = _of_table(path, _parse(path, tomllib.loads, "TOML"))
    elif path.suffix == ".json":
        tensors = _of_json(path, _parse(path, json.loads, "JSON"))
    else:
        raise PlanError(
            f"{path}: a model is read from a folder, .json, .toml or .safetensors"
        )
    if not tensors:
        raise PlanError(f"{path}: there is no tensor in it")
    return tuple(tensors)


def _in_folder(folder: Path) -> Path:
    for name in IN_FOLDER:
        if (folder / name).is_file():
            return folder / name
    raise PlanError(f"{folder}: holds none of {', '.join(IN_FOLDER)}")


def _parse(path: Path, parse: Callable[[str], Any], kind: str) -> dict[str, Any]:
    try:
        data = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"{path}: is no {kind}: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path}: holds a {type(data).__name__}, not a table of keys")
    return data


def _of_json(path: Path, data: Mapping[str, Any]) -> list[ModelTensor]:
    if "weight_map" in data:
        return _of_index(path, data["weight_map"])
    if "tensors" in data:
        return _of_table(path, data)
    if "model_type" in data:
        return _of_config(path)
    raise PlanError(
        f"{path}: has none of the keys weight_map (of a safetensors index), model_type "
        f"(of a Hugging Face config) and tensors (of a table)"
    )


# Tables


def _of_table(path: Path, data: Mapping[str, Any]) -> list[ModelTensor]:
    table = data.get("tensors")
    if not isinstance(table, dict):
        raise PlanError(f"{path}: tensors is {table!r}, but must be a table of names")
    for key in data:
        if key != "tensors":
            raise PlanError(f"{path}: there is no key {key!r}; the key is tensors")
    return [
        _row(f"{path}: tensors.{name!r}", name, value) for name, value in table.items()
    ]


def _row(where: str, name: str, value: object) -> ModelTensor:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape"}:
        raise PlanError(
            f"{where} is {value!r}, but must be a table of dtype and shape, such as "
            f'{{ dtype = "bfloat16", shape = [8, 4] }}'
        )
    shape = value["shape"]
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise PlanError(f"{where}.shape is {shape!r}, but must be a list of sizes")
    return _tensor(f"{where}.dtype", name, value["dtype"], shape)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(where: str, name: str, dtype: object, shape: Iterable[int]) -> ModelTensor:
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise PlanError(f"{where} is {dtype!r}, but must be one of torch's dtypes")
    return ModelTensor(name, dtype, tuple(shape))


# Safetensors


def _of_index(path: Path, weight_map: object) -> list[ModelTensor]:
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise PlanError(f"{path}: weight_map must map names of tensors to files")
    files = [path.parent / name for name in dict.fromkeys(weight_map.values())]
    found = {tensor.name: tensor for tensor in _of_files(path, files)}
    for name, file in weight_map.items():
        if name not in found:
            raise PlanError(f"{path}: weight_map says {name!r} is in {file}: it is not")
    return [found[name] for name in weight_map]


def _of_files(source: Path, files: Iterable[Path]) -> list[ModelTensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UnsupportedError(
            f"{source}: reading it needs safetensors: pip install 'weightsync[cli]'"
        ) from None
    tensors: list[ModelTensor] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 -- it is no mapping
                    part = opened.get_slice(name)
                    dtype = SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype())
                    where = f"{file}: the dtype of {name!r}"
                    tensors.append(_tensor(where, name, dtype, part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise PlanError(f"{file}: cannot be read: {error}") from error
    return tensors


# Hugging Face


def _of_config(path: Path) -> list[ModelTensor]:
    try:
        import transformers
    except ImportError:
        raise UnsupportedError(
            f"{path}: a Hugging Face config needs transformers: "
            f"pip install transformers"
        ) from None
    import torch

    causal: Any = transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            model = causal.from_config(config)
    except Exception as error:
        # Whatever a class of transformers does with a config that it was not made for.
        message = str(error).splitlines()[0] if str(error) else ""
        raise PlanError(
            f"{path}: transformers cannot build it: {type(error).__name__}: {message}"
        ) from error
    return _of_state_dict(path, model.state_dict())


def _of_state_dict(path: Path, state_dict: Mapping[str, Any]) -> list[ModelTensor]:
    first: dict[int, str] = {}
    tensors: list[ModelTensor] = []
    for name, value in state_dict.items():
        dtype = str(value.dtype).removeprefix("torch.")
        tensor = _tensor(f"{path}: the dtype of {name!r}", name, dtype, value.shape)
        owner = first.setdefault(value.untyped_storage()._cdata, name)
        if owner != name:
            tensor = ModelTensor(name, dtype, tensor.shape, owner)
        tensors.append(tensor)
    return tensors
