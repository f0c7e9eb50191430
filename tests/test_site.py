"""The documentation site: every public name and every page is on it."""

import importlib
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MODULES = (
    "kvjax", "kvjax.attention", "kvjax.bench", "kvjax.chats", "kvjax.codecs", "kvjax.engine",
    "kvjax.generation", "kvjax.layouts", "kvjax.memory", "kvjax.models", "kvjax.operations",
    "kvjax.paging", "kvjax.policies", "kvjax.prefixes", "kvjax.rollouts",
    "kvjax.adapters.equinox", "kvjax.adapters.keras", "kvjax.adapters.keras_hub",
    "kvjax.adapters.linen", "kvjax.adapters.lm_eval", "kvjax.adapters.nnx", "kvjax.adapters.tunix",
)  # fmt: skip
"""The modules whose ``__all__`` is public."""


def entries() -> list[str]:
    """The names that pages of the reference describe."""
    pages = sorted((DOCS / "reference").glob("*.md"))
    return [
        name
        for page in pages
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def exported(name: str) -> list[str]:
    """The public names of a module; adapters, whose frameworks take long to import, are read."""
    if ".adapters." in name:
        path = ROOT / (name.replace(".", "/") + ".py")
        listed = re.search(r"^__all__ = \[(.*?)\]", path.read_text(encoding="utf-8"), re.M | re.S)
        assert listed is not None
        return re.findall(r'"(\w+)"', listed[1])
    module = importlib.import_module(name)
    return [each for each in module.__all__ if not isinstance(getattr(module, each), ModuleType)]


def test_the_reference_lists_every_public_name_and_no_other():
    listed = Counter(entries())
    assert max(listed.values()) == 1
    top = set(exported("kvjax"))
    public = {f"kvjax.{name}" for name in top}
    for module in MODULES[1:]:
        again = set() if ".adapters." in module else top  # an adapter's names are its own
        public |= {f"{module}.{name}" for name in exported(module) if name not in again}
    assert set(listed) == public


def test_every_page_is_in_the_menu():
    menu = (
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1].split("\nhooks:")[0]
    )
    in_menu = set(re.findall(r"[\w/.-]+\.(?:md|ipynb)", menu))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    pages = {page for page in pages if not page.startswith("notes/")}
    pages |= {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert in_menu == pages | {"CONTRIBUTING.md", "CHANGELOG.md"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if ".adapters." in name else [])
        for name in entries()
    ],
)
def test_a_public_name_has_a_docstring(name, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    module, _, attribute = name.rpartition(".")
    try:
        value = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        pytest.skip(f"{module} needs {error.name}")
    text = getattr(value, "__doc__", None)
    assert text and len(text.split()) > 3, f"{name} has no docstring"
