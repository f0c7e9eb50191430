"""Every public name has an example in its docstring, and the examples run."""

import ast
import functools
import importlib.util
import re
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from tests.test_site import DOCS, entries

SLOW = {
    "Chat", "Device", "DraftModel", "Engine", "GenerationResult", "Guides", "LanguageModel",
    "PrefixTree", "PromptLookup", "apply_rotary", "attention.RotaryTable", "bench.Bench",
    "bench.Cell", "bench.Split", "bench.measure", "chats.ChatStats", "chats.Turn",
    "codecs.Codec", "codecs.Quantized", "codecs.dequantize_kv", "codecs.quantize_kv",
    "compile", "concatenate", "convert", "engine.EngineStats", "engine.Handle", "evaluate",
    "generation.Batch", "generation.Compiled", "generation.Scored", "language_model",
    "load_cache", "memory.DevicePlan", "memory.InferenceLimits", "memory.plan_on",
    "memory.what_fits", "migrate", "models.Architecture", "models.Gemma3nConfig",
    "models.first_layers", "models.model_rotary", "operations.SavedCache",
    "paging.PageAllocator", "policies.Auto", "prefixes.PrefixStats", "repeat", "rollout",
    "rollouts.Rollout", "save_cache", "score", "stack", "stream",
}  # fmt: skip
"""Examples that compile several programs. Those of adapters, which import a framework, are slow
too."""


@functools.cache
def statements(file: str) -> list[ast.stmt]:
    """The statements of a module."""
    return ast.parse(Path(file).read_text(encoding="utf-8")).body


def docstring(name: str) -> str:
    """The docstring of a public name, read from its source as the site reads it: adapters of
    libraries that are not installed have one too."""
    module, _, attribute = name.rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    body = statements(spec.origin)
    for node, after in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == attribute:
                return ast.get_docstring(node) or ""
            case ast.Assign(targets=[ast.Name(id=found)]) if found == attribute:
                assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                return str(after.value.value)
            case ast.ImportFrom(module=source, level=level):
                for alias in node.names:
                    if (alias.asname or alias.name) == attribute:
                        package = "." * level + (source or "")
                        full = importlib.util.resolve_name(package, spec.parent)
                        return docstring(f"{full}.{alias.name}")
            case _:
                pass
    raise AssertionError(f"{name} is not defined in {spec.origin}")


def example(text: str) -> str:
    """The code of the ``Example:`` section of a docstring; empty if it has none."""
    found = re.search(r"^Example:\n  ```python\n(.*?)\n  ```", text, re.MULTILINE | re.DOTALL)
    return textwrap.dedent(found[1]) if found else ""


def test_every_public_name_has_an_example():
    assert [name for name in entries() if not example(docstring(name))] == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if slow else [])
        for name in entries()
        for slow in [".adapters." in name or name.removeprefix("kvjax.") in SLOW]
    ],
)
def test_an_example_runs(name, embedded, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    names: dict[str, Any] = {
        "Path": Path, "jax": jax, "jnp": jnp, "kvjax": kvjax, "lm": embedded, "models": models,
        "np": np,
    }  # fmt: skip
    assert names.keys() <= set(
        re.findall(r"\w+", (DOCS / "reference" / "index.md").read_text(encoding="utf-8"))
    )
    try:
        exec(compile(example(docstring(name)), name, "exec"), names)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("kvjax"):
            raise
        pytest.skip(f"the example needs {error.name}")
