"""The tree of files in ``docs/design.md``, from the first sentences of their docstrings.

    python -m tests.tree    writes it into the page

The page sets the order: of folders, which is the order of imports, and of files, which shows the
path of a request. New files are added at the end of their folder.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "design.md"
MODELS = "models/         checkpoints; imports kvjax, never the reverse, commands aside"


def first_sentence(path: Path) -> str:
    """The first sentence of a file's docstring, on one line and without Markdown."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"\. (?=[A-Z`])", paragraph)[0].rstrip(".").replace("`", "")


def listed(page: str) -> list[Path]:
    """The folders and files that a page lists, in its order."""
    folders, paths = {0: ROOT / "kvjax"}, []
    for line in page.split("\n## Rooms\n")[1].split("```")[1].strip("\n").splitlines()[1:]:
        indent, name = re.match(r"( *)(\S+)", line).groups()
        if not indent:
            break  # models/ is a folder of its own
        paths.append(folders[len(indent) - 2] / name)
        folders[len(indent)] = paths[-1]
    return paths


def lines(folder: Path, order: list[Path], indent: str = "  ") -> list[str]:
    """A line for each file and folder in a folder."""
    there = [path for path in folder.iterdir() if path != ROOT / "kvjax" / "models"]
    there = [path for path in there if path.suffix == ".py" or (path / "__init__.py").exists()]
    if indent != "  ":
        there.remove(folder / "__init__.py")
    place = {path: i for i, path in enumerate(order)}
    there.sort(key=lambda path: (place.get(path, len(order)), path.name))
    found = []
    for path in there:
        if path.suffix:
            found.append(f"{indent}{path.name:18} {first_sentence(path)}")
        else:
            found.append(f"{indent}{path.name + '/':14}{first_sentence(path / '__init__.py')}")
            found += lines(path, order, indent + "  ")
    return found


def written(page: str) -> str:
    """The page, with the tree of the files that are there."""
    before, rest = page.split("\n## Rooms\n")
    words, _, after = rest.split("```", 2)
    tree = "\n".join(["", "kvjax/", *lines(ROOT / "kvjax", listed(page)), MODELS, ""])
    return f"{before}\n## Rooms\n{words}```{tree}```{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
