"""What the commands share: a mesh from words, text from files, compiled programs kept."""

import os
import sys
from pathlib import Path
from typing import Any

import jax

from kvjax.memory.shapes import SHAPES, ModelShape
from kvjax.placement.mesh import make_mesh, parse_mesh


def given_mesh(words: str) -> Any:
    """A mesh as it is written, or ``"auto"``."""
    if words == "auto":
        return words if jax.process_count() == 1 else make_mesh(tensor=jax.device_count())
    mesh = make_mesh(**parse_mesh(words))
    taking_part = {device.process_index for device in mesh.devices.flat}
    if len(taking_part) < jax.process_count():
        raise ValueError(
            f"--mesh {words} takes {mesh.size} of {jax.device_count()} devices, all of them of "
            f"{len(taking_part)} of the {jax.process_count()} processes: each must have some"
        )
    return mesh


def check_dtype(dtype: str | None) -> None:
    """Raise ``ValueError`` for a dtype that models are not computed in."""
    from kvjax.models.config import DTYPES

    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: there are {', '.join(DTYPES)}")


def known_shape(name: str) -> ModelShape:
    """A well-known shape."""
    if name not in SHAPES:
        raise ValueError(f"no shape {name!r} is known: there are {', '.join(SHAPES)}")
    return SHAPES[name]


def read(file: Path | None) -> str:
    """The words of a file, or of standard input; a ``ValueError`` if they are not UTF-8."""
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
