"""Where the libraries of the emulator are, and whether this torch can use them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weightsync.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

RUNTIME: Final = "libweightsync_cudart.so"
DRIVER: Final = "libcuda.so.1"
MANAGEMENT: Final = "libnvidia-ml.so.1"
NCCL: Final = "libnccl.so.2"
LIBRARIES: Final = (RUNTIME, DRIVER, MANAGEMENT, NCCL)


def library_folders() -> list[Path]:
    """Return where the libraries may be, the likeliest first.

    That is beside the extension; in an editable install it is not beside the sources.
    """
    places = [Path(__file__).parents[1]]
    extension = find_spec("weightsync._C")
    if extension is not None and extension.origin is not None:
        places.insert(0, Path(extension.origin).parent)
    return [place / "_emulator" for place in places]


def find_libraries(folders: Sequence[Path]) -> Path:
    """Return the first folder with all libraries; UnsupportedError without one."""
    found = [folder for folder in folders if not _missing(folder)]
    if not found:
        missing = ", ".join(_missing(folders[0]))
        raise UnsupportedError(
            f"the emulator is not complete: {missing} should be in {folders[0]}: "
            f"install weightsync again, with pip install --no-build-isolation"
        )
    if set(" :;") & set(str(found[0])):
        raise UnsupportedError(
            f"the emulator is in {str(found[0])!r}, and LD_PRELOAD takes no path with "
            f"a blank or a colon: install weightsync elsewhere"
        )
    return found[0]


def torch_folder() -> Path | None:
    """Return where torch is installed, without importing it."""
    torch = find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return None
    return Path(torch.submodule_search_locations[0])


def check_torch(folder: Path | None) -> None:
    """Raise UnsupportedError unless there is a build of torch for CUDA."""
    if folder is None:
        raise UnsupportedError("torch is not installed: pip install torch")
    if not (folder / "lib" / "libtorch_cuda.so").is_file():
        raise UnsupportedError(
            f"the torch in {folder} is built without CUDA, so it cannot use a GPU, "
            f"emulated or not: install a CUDA build of torch (it needs no GPU)"
        )


def _missing(folder: Path) -> list[str]:
    return [name for name in LIBRARIES if not (folder / name).is_file()]
