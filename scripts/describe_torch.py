"""Print what CMake must know about torch and Python, separated by semicolons."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

print(
    Path(torch.__file__).parent,
    torch.__version__.split("+")[0],
    int(torch.compiled_with_cxx11_abi()),
    sysconfig.get_path("include"),
    sysconfig.get_config_var("EXT_SUFFIX"),
    sep=";",
    end="",
)
