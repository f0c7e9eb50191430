"""The engines kvjax is compared with: which there are, where they run, and which stay out."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TRANSFORMERS = (
    "transformers-static-eager",
    "transformers-static-sdpa",
    "transformers-dynamic-eager",
    "transformers-dynamic-sdpa",
)
ENGINES = (
    *TRANSFORMERS,
    "transformers-static-compile",
    "llama_cpp-f16",
    "llama_cpp-f16-plain",
    "llama_cpp-q8_0",
    "openvino",
    "mlx",
)

ONLY_IN: dict[str, set[tuple[int, int]]] = {
    # Each compiles anew, for half a minute or more.
    "transformers-static-compile": {(1, 64), (1, 2048)},
    # Its prompts take minutes where they are long.
    "llama_cpp-f16-plain": {(1, 64), (1, 2048)},
    "llama_cpp-q8_0": {(1, 2048), (1, 8192)},
    # On a CPU a prompt of 2,048 takes minutes.
    "mlx": {(1, 64)},
}
"""Batch and prompt of the cells an engine is timed in, where that is not all."""

NEEDS = {
    "transformers": "import torch, transformers",
    "transformers-static-compile": (
        "import torch, transformers; torch.compile(lambda x: x.sin() + 1)(torch.ones(64))"
    ),
    "llama_cpp": "import llama_cpp",
    "openvino": "import openvino",
    "mlx": "import mlx_lm",
}
"""What must run in an engine's interpreter, by family or by name."""

_PROBE = """
try:
    import numpy, safetensors
    {code}
except Exception as error:
    print("missing:", type(error).__name__ + ":", (str(error).splitlines() or [""])[0][:120])
"""


def family(engine: str) -> str:
    """The package behind an engine: what stands before the first dash."""
    return engine.partition("-")[0]


def add_arguments(parser: argparse.ArgumentParser, peers: str) -> None:
    """The options that choose engines, by default `peers`."""
    parser.add_argument(
        "--peers",
        default=peers,
        help="none, transformers, all, or names with commas of "
        f"{', '.join(ENGINES)}; default {peers}",
    )
    parser.add_argument(
        "--peer-python", default=sys.executable, help="interpreter that has the peers' packages"
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the interpreter of one engine or family, such as openvino=PATH; may be repeated",
    )


def chosen(peers: str) -> tuple[str, ...]:
    """The engines that `--peers` names, in the order of `ENGINES`.

    Raises:
      ValueError: if there is no such engine.
    """
    groups = {"none": (), "transformers": TRANSFORMERS, "all": ENGINES}
    if peers in groups:
        return groups[peers]
    names = [name.strip() for name in peers.split(",")]
    if unknown := set(names) - set(ENGINES):
        known = ", ".join((*groups, *ENGINES))
        raise ValueError(f"unknown peers {sorted(unknown)}; there are {known}")
    return tuple(name for name in ENGINES if name in names)


def interpreters(options: argparse.Namespace, head_dim: int) -> tuple[dict[str, str], list[str]]:
    """Each engine that can run with its interpreter, kvjax first; a sentence for each that can't.

    `head_dim`: channels of a head of the model that they will run.

    Raises:
      ValueError: if an engine is not known, or `--python` is not a name and a path.
    """
    names = chosen(options.peers)
    own: dict[str, str] = {}
    for given in options.python:
        name, equals, path = given.partition("=")
        if not (equals and path) or name not in {*ENGINES, *map(family, ENGINES)}:
            raise ValueError(f"--python takes NAME=PATH, such as openvino=PATH; got {given!r}")
        own[name] = path
    found, left_out = {"kvjax": sys.executable}, []
    reasons: dict[tuple[str, str], str] = {}
    for name in names:
        if name.endswith("-q8_0") and head_dim % 32:
            left_out.append(f"{name} is left out: groups of 32 don't divide {head_dim} channels.")
            continue
        path = own.get(name) or own.get(family(name)) or options.peer_python
        code = NEEDS.get(name, NEEDS[family(name)])
        if (path, code) not in reasons:
            reasons[path, code] = missing(path, code)
        if reason := reasons[path, code]:
            left_out.append(f"{name} is left out: {reason}.")
        else:
            found[name] = path
    return found, left_out


def missing(interpreter: str, code: str) -> str:
    """Why `code` does not run in an interpreter; empty if it does."""
    probe = [interpreter, "-c", _PROBE.format(code=code)]
    try:
        done = subprocess.run(probe, capture_output=True, encoding="utf-8")
    except OSError:
        return "its interpreter can't be started"
    lines = [line for line in done.stdout.splitlines() if line.startswith("missing:")]
    if lines:
        return lines[-1].removeprefix("missing:").strip().rstrip(".")
    return f"its interpreter ended with code {done.returncode}" if done.returncode else ""


def in_cell(engine: str, batch: int, prompt: int) -> bool:
    """Whether an engine is timed in a cell."""
    return engine not in ONLY_IN or (batch, prompt) in ONLY_IN[engine]


def without_paths(words: Sequence[str]) -> list[str]:
    """A command line without what says where things are on this machine. Of a GGUF file, the name
    stays."""
    # An interpreter's place says nothing to a reader, and is no one else's.
    options = ("--peer-python", "--python", "--out")
    kept, skip = [], False
    for word in words:
        if skip or word.startswith(tuple(f"{option}=" for option in options)):
            skip = False
        elif word in options:
            skip = True
        else:
            kept.append(Path(word).name if word.endswith(".gguf") else word)
    return kept
