"""The house itself: floors, archives, the README, and what may be imported."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import kvjax

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# docs/design.md, Floors. A name stands for a file or a folder of kvjax/; the facade, __init__.py,
# is above all but the command line.
FACADE = 6
FLOORS = {
    "_typing": 0,
    "_checks": 0,
    "_errors": 0,
    "_device": 0.25,
    "_context": 0,
    "mesh": 0.5,
    "spread": 0.75,
    "_tree": 0,
    "_stats": 0,
    "_text": 0,
    "_figures": 0,
    "_bandwidth": 0.5,
    "codecs": 1,
    "layouts": 1,
    "rotary": 1,
    "shape": 1,
    "status": 1,
    "placement": 1,
    "budget": 1.5,
    "policy": 2,
    "presets": 2.5,
    "_across": 2,
    "_sight": 2,
    "_write": 2,
    "quantize": 2,
    "_tail": 2.5,
    "layer": 2.6,
    "cache": 3,
    "_call": 2.7,
    "_append": 2.8,
    "_segments": 3.4,  # the parts of attention.py, in their order
    "_walk": 3.6,
    "_buckets": 3.7,
    "kernels": 3.8,
    "_paths": 3.9,
    "operations": 3.9,
    "convert": 3.9,
    "migrate": 4,
    "attention": 4,
    "sampling": 4,
    "_model": 4,
    "model_shape": 1,
    "memory": 4.1,
    "limits": 4.15,
    "_loop": 4.2,  # the parts of generate.py, in their order
    "_request": 4.4,
    "_chunks": 4.5,
    "_stream": 4.6,
    "generate": 5,
    "batches": 5.2,
    "speculative": 5,
    "beam": 5,
    "paging": 5,
    "engine": 5,
    "compile_ahead": 5,
    "_counted": 4.2,
    "_timed": 4.8,
    "bench": 5,
    "evaluate": 5,
    "_report": 5.5,
    "_bench_report": 5.5,
    "checkpoint": 5,
    "_cli_common": 6.5,
    "_cli_eval": 6.7,
    "_cli_distributed": 6.5,
    "_cli_plan": 6.7,
    "_cli_bench": 6.7,
    "cli": 7,
    "__main__": 8,
}


def python_files(folder: str) -> list[Path]:
    """The Python files below a folder of the project; links are not followed."""
    found = []
    for top, folders, files in os.walk(ROOT / folder):
        folders[:] = [f for f in folders if not (Path(top) / f).is_symlink()]
        found += [Path(top) / f for f in files if f.endswith(".py")]
    if folder == "kvjax":  # in an unpacked sdist, the models stand there and no link
        found = [f for f in found if f.relative_to(ROOT).parts[1] != "models"]
    assert found
    return sorted(found)


MODELS = "models" if (ROOT / "models").is_dir() else "kvjax/models"


def imports(path: Path, package: str) -> set[str]:
    """Absolute names of the modules a file imports, wherever in it, ``package`` being its own."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            # `from kvjax import cache` may name a module or something of the facade's.
            submodules = base == "kvjax" and {a.name for a in node.names} & {*FLOORS, "models"}
            names |= {f"kvjax.{name}" for name in submodules} if submodules else {base}
    return names


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


@pytest.mark.parametrize("path", python_files("kvjax"), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_from_floors_below(path):
    place = path.relative_to(ROOT / "kvjax").parts[0].removesuffix(".py")
    if place == "__init__":
        floor = FACADE
    else:
        assert place in FLOORS, (
            f"{place} stands on no floor: add it to the table and docs/design.md"
        )
        floor = FLOORS[place]
    for name in imports(path, package_of(path)):
        top, *rest = name.split(".")
        if top != "kvjax" or rest[:1] == [place]:
            continue
        if rest[:1] == ["models"]:
            assert "cli" in place, f"{path.name} imports {name}; of kvjax only commands may"
        else:
            below = FLOORS[rest[0]] if rest else FACADE
            assert below < floor, f"{path.name} (floor {floor}) imports {name} (floor {below})"


@pytest.mark.parametrize("path", python_files(MODELS), ids=lambda p: str(p.relative_to(ROOT)))
def test_models_are_imported_by_one_name(path):
    package = "kvjax." + package_of(path).removeprefix("kvjax.")
    for name in imports(path, package):
        assert name.split(".")[0] != "models", f"{path.name}: import it as kvjax.models"
        assert name not in ("kvjax.cli", "kvjax.__main__")


def test_only_declared_packages_are_imported():
    distributions = {re.split(r"[\[<>=~!; ]", d)[0] for d in PROJECT["dependencies"]}
    modules = {name.replace("-", "_") for name in distributions}
    modules |= {"orbax"} if "orbax-checkpoint" in distributions else set()
    for path in python_files("kvjax") + python_files(MODELS):
        for name in imports(path, "kvjax." + package_of(path).removeprefix("kvjax.")):
            top = name.split(".")[0]
            assert top in modules | {"kvjax"} | set(sys.stdlib_module_names), f"{path}: {name}"


def test_models_is_a_relative_link():
    if not (ROOT / "models").is_dir():
        pytest.skip("an unpacked sdist holds the models as kvjax/models, without the link")
    assert Path(os.readlink(ROOT / "kvjax" / "models")) == Path("../models")


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """A wheel and an sdist of this checkout."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("needs hatchling (the extra `test`)")
    folder = tmp_path_factory.mktemp("archives")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def test_archives_hold_the_models_once(archives):
    wheel, sdist = archives
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {name.split("/")[0] for name in in_wheel} == {
        "kvjax",
        f"kvjax-{kvjax.__version__}.dist-info",
    }
    wanted = {f"kvjax/models/{p.relative_to(ROOT / MODELS)}" for p in python_files(MODELS)}
    wanted |= {f"kvjax/models/tiny/{name}" for name in ("config.json", "README.md")}
    wanted |= {
        f"kvjax/models/tiny/{p.name}" for p in (ROOT / MODELS / "tiny").glob("*.safetensors")
    }
    wanted |= {"kvjax/py.typed", "kvjax/models/tiny/tokenizer.json"}
    assert wanted <= in_wheel
    assert wanted | {"pyproject.toml", "tests/test_project.py", "LICENSE"} <= in_sdist
    assert not any(name.startswith("models/") for name in in_sdist)
    assert not any(name.endswith(".png") for name in in_wheel)


def test_an_unpacked_wheel_generates_text(archives, tmp_path):
    with zipfile.ZipFile(archives[0]) as archive:
        archive.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "import kvjax.models as m; print(m.__file__); m.load()"]
    found = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert Path(found.stdout.strip()).is_relative_to(tmp_path)


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_readme_begins_with_two_commands():
    blocks = fenced((ROOT / "README.md").read_text(encoding="utf-8"), "[a-z]*")
    for block, wanted in zip(blocks, ("kvjax generate", "-m pytest"), strict=False):
        assert block.count("\n") == 1 and "pip install" in block and wanted in block
    assert "[test]" in blocks[1]


def test_readme_examples_run(capsys, tiny_llama_dir, full):
    """Word by word with ``KVJAX_FULL=1``; else with a smaller model."""
    namespace: dict[str, object] = {}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("models.load()") == 1
    if not full:
        text = text.replace("models.load()", f'models.load("{tiny_llama_dir.as_posix()}")')
    for block in fenced(text, "python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert capsys.readouterr().out.strip()


def test_version_is_that_of_the_changelog():
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert next(v for v in versions if v != "Unreleased") == kvjax.__version__
