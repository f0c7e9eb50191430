"""What the commands share: options, text from files, compiled programs kept between runs."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A folder or a hub id; by default the embedded model."),
]
RevisionOption = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub id; by default its main branch.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16; by default the best for the device."),
]
CacheOption = Annotated[
    str,
    typer.Option(
        "--cache",
        help="The cache policy, by name: static, dynamic, sliding_window, hybrid, quantized, "
        "offloaded, offloaded_static, auto.",
    ),
]
BitsOption = Annotated[
    int | None,
    typer.Option("--kv-bits", help="Quantize the cache: 8, 4, 3, 2 or 1 bits a number."),
]
KeyBitsOption = Annotated[int | None, typer.Option(help="The same for keys alone.")]
ValueBitsOption = Annotated[int | None, typer.Option(help="The same for values alone.")]
GroupOption = Annotated[
    int | None, typer.Option("--group-size", help="Numbers that share a scale; by default 64.")
]
PrefetchOption = Annotated[
    int | None,
    typer.Option(help="Of a cache on the host: fetch layers so many ahead of their turn."),
]
CacheMemoryOption = Annotated[
    str | None,
    typer.Option(help="Of --cache auto: what it may take of the device: 8GiB, 500MB."),
]
TemperatureOption = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
TopKOption = Annotated[int | None, typer.Option(help="Sample among the k likeliest.")]
TopPOption = Annotated[
    float | None, typer.Option(help="Sample among the likeliest that make up p.")
]
MinPOption = Annotated[
    float | None, typer.Option(help="Sample among those of at least p times the likeliest.")
]

MeshOption = Annotated[
    str,
    typer.Option(
        "--mesh",
        help="Devices to share the work: data=2,tensor=2,sequence=2. By default (auto) a model "
        "that one device has no memory for is spread over the local ones; with --distributed, "
        "every model over all of them.",
    ),
]


def given_mesh(words: str) -> Any:
    """A mesh as it is written, or ``"auto"``."""
    import jax

    from kvjax.placement.mesh import make_mesh, parse_mesh

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


def read(file: Path) -> str:
    """The words of a file; a ``ValueError`` if they are not UTF-8."""
    return utf8(str(file), file.read_bytes())


def utf8(source: str, raw: bytes) -> str:
    """Words from bytes; a ``ValueError`` that names where they are from, if they are not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: the text is not UTF-8 (byte {error.start})") from None


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, in JAX_COMPILATION_CACHE_DIR or the user's cache."""
    import jax

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
