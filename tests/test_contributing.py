"""CONTRIBUTING's recipes and the design's tree: they name everything, and nothing else."""

import re
from pathlib import Path
from typing import Any

import pytest

import kvjax
from kvjax.codecs import Codec, Int4
from kvjax.layouts import Layout, Ring
from tests import matrix, tree

ROOT = Path(__file__).resolve().parents[1]


def listed(recipe: str) -> list[str]:
    """The names at the beginning of a recipe's list entries."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {recipe}\n")[1].split("\n## ")[0]
    return re.findall(r"^ +- `(\w+)`", section, re.MULTILINE)


@pytest.mark.parametrize(("recipe", "protocol"), [("Add a codec", Codec), ("Add a layout", Layout)])
def test_a_recipe_lists_every_member(recipe, protocol):
    classes = [cls for cls in protocol.__mro__ if cls.__module__.startswith("kvjax")]
    declared = {name for cls in classes for name in (*vars(cls), *cls.__annotations__)}
    names = listed(recipe)
    assert len(names) == len(set(names))
    assert set(names) == {name for name in declared if not name.startswith("_")}


def costs() -> dict[str, list[int]]:
    """CONTRIBUTING's table of what a part more costs: cells by law, then seconds."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("\n| one more |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {part: [int(number) for number in numbers] for part, *numbers in rows}


def telling_cells() -> list[int]:
    """Cells that the README's command runs: recompute (three laws), copy, mesh, path."""
    pairs = matrix.CACHE_PAIRS + matrix.OPERATION_PAIRS
    caches = matrix.smallest_set(matrix.choice(matrix.cache_cells(), pairs))
    others = (
        (matrix.copy_cells(), matrix.COPY_PAIRS),
        (matrix.mesh_cells(), matrix.MESH_PAIRS),
        (matrix.path_cells(), matrix.PATH_PAIRS),
    )
    found = [len(matrix.smallest_set(matrix.choice(every, kinds))) for every, kinds in others]
    return [3 * len(caches), *found]


PARTS: dict[str, tuple[dict[str, Any], Any]] = {
    "codec": (matrix.CODECS, Int4("head")),
    "layout": (matrix.LAYOUTS, (Ring(23, slack=15), (23, 0))),
    "placement": (matrix.PLACEMENTS, kvjax.Host(3)),
    "mesh": (matrix.MESHES, (4, 2, 1)),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_more_costs_the_readme_s_command_at_most_15_s(part, monkeypatch):
    *cells, for_these, others, in_all = costs()[part]
    assert in_all == for_these + others <= 15
    before = telling_cells()
    monkeypatch.setitem(*PARTS[part][:1], "one-more", PARTS[part][1])
    more = [now - then for now, then in zip(telling_cells(), before, strict=True)]
    assert all(added <= told for added, told in zip(more, cells, strict=True)), more


def test_the_costs_name_every_part():
    assert [*costs()] == [*PARTS]


def test_the_tree_is_that_of_the_docstrings():
    """``python -m tests.tree`` writes it."""
    page = tree.PAGE.read_text(encoding="utf-8")
    assert page == tree.written(page)
    assert max(map(len, page.split("\n## Rooms\n")[1].split("```")[1].splitlines())) <= 120


def test_a_new_file_joins_the_end_of_its_folder(tmp_path):
    folder = tmp_path / "room"
    folder.mkdir()
    for name in ("__init__", "a", "b"):
        (folder / f"{name}.py").write_text(f'"""Of ``{name}``.\n\nMore."""', encoding="utf-8")
    found = tree.lines(tmp_path, [folder / "b.py"])
    words = [line.split() for line in found]
    assert words == [["room/", "Of", "__init__"], ["b.py", "Of", "b"], ["a.py", "Of", "a"]]


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_no_file_that_is_not_there(page):
    text = page.read_text(encoding="utf-8")
    folders = ("kvjax", "models", "tests", "benchmarks")
    there = [str(path) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for name in re.findall(r"(?<!mlx-lm's )`([\w/]+\.py)\b", text):
        assert any(path.endswith(f"/{name}") for path in there), name
