"""CONTRIBUTING's recipes and the design's tree: they name everything, and nothing else."""

import re
from pathlib import Path

import pytest

from kvjax.codecs import Codec
from kvjax.layouts import Layout

ROOT = Path(__file__).resolve().parents[1]


def listed(recipe: str) -> list[str]:
    """The names at the beginning of a recipe's list entries."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {recipe}\n")[1].split("\n## ")[0]
    return re.findall(r"^ +- `(\w+)`", section, re.MULTILINE)


@pytest.mark.parametrize(("recipe", "protocol"), [("Add a codec", Codec), ("Add a layout", Layout)])
def test_a_recipe_lists_every_member(recipe, protocol):
    declared = {**vars(protocol), **protocol.__annotations__}
    names = listed(recipe)
    assert len(names) == len(set(names))
    assert set(names) == {name for name in declared if not name.startswith("_")}


def test_the_tree_has_a_line_a_file():
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    tree = design.split("\n## Rooms\n")[1].split("```")[1]
    folders, found = {0: Path("kvjax")}, set()
    for line in tree.strip("\n").splitlines()[1:]:
        indent, name, words = re.match(r"( *)(\S+) +(.+)", line).groups()
        if not indent:
            break  # models/ is a folder of its own
        path = folders[len(indent) - 2] / name
        assert len(words.split()) <= 10 or name.endswith("/"), line
        if name.endswith("/"):
            folders[len(indent)] = path
        else:
            assert path not in found, line
            found.add(path)
    every = {path.relative_to(ROOT) for path in (ROOT / "kvjax").rglob("*.py")}
    rooms = {path for path in every if path.parts[1] != "models" and path.name != "__init__.py"}
    assert found == rooms | {Path("kvjax/__init__.py")}


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_no_file_that_is_not_there(page):
    text = page.read_text(encoding="utf-8")
    folders = ("kvjax", "models", "tests", "benchmarks")
    there = [str(path) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for name in re.findall(r"(?<!mlx-lm's )`([\w/]+\.py)\b", text):
        assert any(path.endswith(f"/{name}") for path in there), name
