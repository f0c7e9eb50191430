"""Helpers of several commands: meshes, dtypes, shapes, text files, the compilation cache."""

import os
import sys
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh

from kvjax.memory.shapes import SHAPES, ModelShape
from kvjax.placement.mesh import make_mesh, parse_mesh


def mesh_from_option(value: str) -> Mesh | Literal["auto"]:
    """The mesh of ``--mesh``, or ``"auto"`` to let the model loader choose one."""
    if value == "auto":
        if jax.process_count() == 1:
            return "auto"
        return make_mesh(tensor=jax.device_count())
    mesh = make_mesh(**parse_mesh(value))
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) < jax.process_count():
        raise ValueError(
            f"--mesh {value} has {mesh.size} of {jax.device_count()} devices, in {len(processes)} "
            f"of {jax.process_count()} processes: every process must have a device of the mesh"
        )
    return mesh


def check_dtype(dtype: str | None) -> None:
    """Raise ``ValueError`` for a dtype that models can't use."""
    from kvjax.models.config import DTYPES

    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: give one of {', '.join(DTYPES)}")


def known_shape(name: str) -> ModelShape:
    """The well-known shape of that name."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}: give one of {', '.join(SHAPES)}")
    return SHAPES[name]


def read_text(file: Path | None) -> str:
    """The UTF-8 text of a file, or of standard input.

    Raises:
      ValueError: if it is not UTF-8.
    """
    raw = sys.stdin.buffer.read() if file is None else file.read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        source = file or "standard input"
        raise ValueError(f"{source}: the text is not UTF-8 (byte {error.start})") from None


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, in JAX_COMPILATION_CACHE_DIR or the user's cache."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(_user_cache() / "kvjax" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
