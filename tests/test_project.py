"""The house itself: rooms, archives, the README, and what may be imported."""

import ast
import functools
import graphlib
import importlib
import importlib.util
import inspect
import itertools
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import kvjax
from kvjax.attention import attend
from kvjax.cache import appending
from kvjax.codecs import Centered, HalfQuadratic, Int4, Int8, Rotated, Unrotated
from kvjax.layouts import Dense, Paged, Ring
from tests.matrix import tiny_config

ROOT = Path(__file__).resolve().parents[1]
KVJAX = Path(kvjax.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def rooms() -> list[str]:
    """The folders of kvjax/, from the ground up, as docs/design.md lists them."""
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    listed = design.split("\n## Rooms\n")[1].split("```")[1]
    return re.findall(r"^  (\w+)/ ", listed, re.MULTILINE)


ROOMS = rooms()
TOPS = ("__init__", "__main__", "models")  # above all rooms; of these only commands import models
COMMANDS = ("lm_eval.py",)  # outside of cli/: python -m kvjax.adapters.lm_eval


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


TOKENS = 128
"""Of a call that is followed: two blocks."""
MANY = 32
"""Rows of what is keys or values, even packed: more than heads, channels or queries."""
FILES = 10
"""At most; and one more for each codec around another one of the keys."""
AROUND = {("cache", "explicit_axes.py"), ("core", "mesh_context.py"), ("core", "control_flow.py")}
"""Files whose functions call others that they are given: decorators, loops and branches."""
WALKED = {
    "raw": kvjax.CachePolicy(),
    "int8": kvjax.CachePolicy(Dense(), Int8(), Int8()),
    "codecs around codecs": kvjax.CachePolicy(
        Dense(),
        Centered(Rotated(Int4())),
        HalfQuadratic(Int4(zero_point=True)),
    ),
    "ring of unrotated keys": kvjax.CachePolicy(
        Ring(16, sinks=2, slack=TOKENS),
        Unrotated(Int4()),
        Int4(),
    ),
    "host": kvjax.CachePolicy(placement=kvjax.Host()),
    "pages": kvjax.CachePolicy(Paged(64), Int8(), Int8()),
}
"""Policies whose calls are followed."""
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
            known = {a.name for a in node.names if (base, a.name) in SUBMODULES}
            names |= {f"{base}.{name}" for name in known} if known else {base}
    return names


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SUBMODULES = {tuple(module_of(path).rpartition(".")[::2]) for path in python_files("kvjax")}
SUBMODULES |= {("kvjax", "models")}


def test_the_rooms_are_those_of_the_design():
    folders = {path.relative_to(ROOT / "kvjax").parts[0] for path in python_files("kvjax")}
    assert {name for name in folders if not name.endswith(".py")} == set(ROOMS)


@pytest.mark.parametrize("path", python_files("kvjax"), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_from_its_room_and_those_above(path):
    room = path.relative_to(ROOT / "kvjax").parts[0].removesuffix(".py")
    for name in imports(path, package_of(path)):
        top, *rest = name.split(".")
        if top != "kvjax" or room in TOPS:
            continue
        if rest[:1] == ["models"] or not rest:
            assert room == "cli" or path.name in COMMANDS, f"{path.name} imports {name}"
        else:
            above = ROOMS[: ROOMS.index(room) + 1]
            assert rest[0] in above, f"{path.name} (in {room}/) imports {name}"


@pytest.mark.parametrize("room", ROOMS)
def test_the_files_of_a_room_import_each_other_without_a_circle(room):
    files = python_files(f"kvjax/{room}")
    needs = {module_of(path): imports(path, package_of(path)) for path in files}
    # A room that hands its names on is left through its files alone.
    graph = {name: (found & set(needs)) - {f"kvjax.{room}"} for name, found in needs.items()}
    graphlib.TopologicalSorter(graph).prepare()


@functools.cache
def place_of(filename: str) -> tuple[str, ...]:
    """Of a file of kvjax: its room and its name."""
    path = Path(filename)
    return path.relative_to(KVJAX).parts if path.is_relative_to(KVJAX) else ()


def holds_tokens(x: Any) -> bool:
    """Whether an argument is, or has beside others, an array [batch, heads, ...] of many rows: of
    keys, values or scores, not of a cache that is handed on."""
    arrays = isinstance(x, jax.Array | tuple | list) or type(x).__module__.startswith(
        "kvjax.codecs"
    )
    shapes = map(np.shape, jax.tree.leaves(x)) if arrays else ()
    return any(len(shape) > 3 and max(shape) >= MANY for shape in shapes)


def called(step: Callable[..., Any], *args: Any) -> tuple[set[tuple[str, ...]], set[str]]:
    """Of a step that is traced: the rooms that calls stand in, from the first to the last one of
    their stacks, and the files of functions that are given keys or values, stored or as numbers, or
    scores."""
    stacks, files = set(), set()

    def note(frame: FrameType | None, event: str, _: Any) -> None:
        here = place_of(frame.f_code.co_filename) if frame and event == "call" else ()
        # JAX tells its listener, in generation, that a step is traced.
        if not here or here[0] == "generation" or here in AROUND:
            return
        count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
        count += bool(frame.f_code.co_flags & inspect.CO_VARARGS)
        names = frame.f_code.co_varnames[:count]
        if any(holds_tokens(frame.f_locals.get(name)) for name in names):
            files.add("/".join(here))
        rooms = []
        while frame:
            place = place_of(frame.f_code.co_filename)
            rooms += () if place in AROUND else place[:1]
            frame = frame.f_back
        stacks.add(tuple(room for room, _ in itertools.groupby(reversed(rooms))))

    with pytest.MonkeyPatch.context() as patch:
        # What was traced before would not be seen.
        patch.setattr(attend, "_attend_once", attend._attend)
        patch.setattr(appending, "write_layer", inspect.unwrap(appending.write_layer))
        sys.setprofile(note)
        try:
            jax.eval_shape(step, *args)
        finally:
            sys.setprofile(None)
    return stacks, files


@pytest.mark.slow(but=("raw-1", "host-1"))
@pytest.mark.parametrize("new", [1, pytest.param(16, marks=pytest.mark.rare)])
@pytest.mark.parametrize("policy", WALKED)
def test_keys_go_down_the_rooms_and_enter_none_twice(policy, new):
    config = tiny_config(num_hidden_layers=1, windows=(None,))
    cache = kvjax.init_cache(config, WALKED[policy], max_len=2 * TOKENS)
    around = repr(WALKED[policy].keys).count("codec=")
    keys, queries = jnp.ones((1, 2, TOKENS, 8)), jnp.ones((1, 4, new, 8))
    table = kvjax.rotary_table(np.ones(4))
    written = called(lambda c, k: kvjax.append(c, 0, k, k, rotary=table), cache, keys)
    cache = kvjax.advance(kvjax.append(cache, 0, keys, keys, rotary=table), TOKENS)
    cache = kvjax.append(cache, 0, keys[:, :, :new], keys[:, :, :new], rotary=table)
    mixed = called(lambda c, q: kvjax.attend(q, c, 0, rotary=table), cache, queries)
    for (stacks, files), first in ((written, "cache"), (mixed, "attention")):
        assert first in {file.split("/")[0] for file in files}
        assert len({file.split("/")[0] for file in files}) <= 6
        assert 5 <= len(files) <= FILES + around, sorted(files)
        for stack in stacks:
            floors = [ROOMS.index(room) for room in stack]
            assert stack[0] == first
            assert floors == sorted(set(floors), reverse=True), stack


def of_the_locale(call: ast.Call) -> bool:
    """Whether a call opens text in an encoding that it does not say."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = {word.arg for word in call.keywords}
    if name in ("read_text", "write_text"):
        return "encoding" not in given and len(call.args) < (1 if name == "read_text" else 2)
    if name in ("open", "fdopen", "TemporaryFile", "NamedTemporaryFile"):
        modes = [x.value for x in call.args if isinstance(x, ast.Constant)]
        modes = [x for x in modes if isinstance(x, str) and x.strip("rwaxbt+") == ""]
        alone = isinstance(call.func, ast.Name) or not call.args  # text is what is read by default
        text = "b" not in modes[0] if modes else alone and name == "open" and "mode" not in given
        return text and "encoding" not in given and len(call.args) < 4
    as_text = any(x.arg == "text" and getattr(x.value, "value", 0) is True for x in call.keywords)
    return as_text and "encoding" not in given


def test_text_is_in_utf_8_whatever_the_locale():
    found = []
    folders = ("kvjax", "benchmarks")
    for path in [*(p for f in folders for p in python_files(f)), *python_files(MODELS)]:
        source = path.read_text(encoding="utf-8")
        if not any(word in source for word in ("open(", "_text(", "text=True", "TemporaryFile(")):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and of_the_locale(node):
                found.append(f"{path}:{node.lineno}")
    assert not found


def test_no_function_hides_a_module():
    """A package that exports a function must not have a module of the same name."""
    for path in [*python_files("kvjax"), *python_files(MODELS)]:
        package, _, name = module_of(path).rpartition(".")
        if package and name != "__main__":
            package = f"kvjax.{package.removeprefix('kvjax').strip('.')}".rstrip(".")
            found = getattr(importlib.import_module(package), name, None)
            assert not inspect.isfunction(found), path


@pytest.mark.parametrize("path", python_files(MODELS), ids=lambda p: str(p.relative_to(ROOT)))
def test_models_are_imported_by_one_name(path):
    package = "kvjax." + package_of(path).removeprefix("kvjax.")
    for name in imports(path, package):
        assert name.split(".")[0] != "models", f"{path.name}: import it as kvjax.models"
        assert name not in ("kvjax.cli", "kvjax.__main__")


def test_only_declared_packages_are_imported():
    extras = PROJECT["optional-dependencies"]
    declared = PROJECT["dependencies"] + extras["plots"] + extras["serve"] + extras["guided"]
    declared += (
        extras["gguf"]
        + extras["adapters"]
        + extras["keras-hub"]
        + extras["tunix"]
        + extras["lm-eval"]
    )
    distributions = {re.split(r"[\[<>=~!; ]", d)[0] for d in declared}
    modules = {name.replace("-", "_") for name in distributions}
    modules |= {"tunix"}  # of google-tunix
    modules |= {"orbax"} if "orbax-checkpoint" in distributions else set()
    for path in python_files("kvjax") + python_files(MODELS):
        for name in imports(path, "kvjax." + package_of(path).removeprefix("kvjax.")):
            top = name.split(".")[0]
            assert top in modules | {"kvjax"} | set(sys.stdlib_module_names), f"{path}: {name}"


def test_kvjax_alone_imports_nothing_of_training_plots_or_the_command_line():
    late = {
        "equinox",
        "flax",
        "gguf",
        "keras",
        "keras_hub",
        "huggingface_hub",
        "jinja2",
        "llguidance",
        "matplotlib",
        "optax",
        "orbax",
    }
    late |= {"prometheus_client", "rich", "starlette", "typer", "uvicorn"}
    program = f"import sys, kvjax; print({late} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert found.stdout == "set()\n"


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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_the_tests_see_a_shape_that_is_wrong():
    """Of arguments; functions that name no shape are as they are."""
    layout = Dense(8)
    assert not hasattr(Dense.resolve, "__wrapped__")
    slots, row = np.zeros(8, np.int32), np.zeros(2, np.int32)
    with pytest.raises(jaxtyping.TypeCheckError, match="written"):
        layout.positions(row, np.zeros(3, np.int32), slots)
    with pytest.raises(jaxtyping.TypeCheckError, match="slots"):
        layout.positions(row, row, np.zeros(8))


def test_readme_begins_with_two_commands():
    blocks = fenced((ROOT / "README.md").read_text(encoding="utf-8"), "[a-z]*")
    for block, wanted in zip(blocks, ("kvjax generate", "-m pytest"), strict=False):
        assert block.count("\n") == 1 and "pip install" in block and wanted in block
    assert "[test]" in blocks[1]


def test_readme_examples_run(capsys, monkeypatch, tmp_path, tiny_llama_dir, full):
    """Word by word with ``KVJAX_FULL=1``; else with a smaller model."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("models.load()") == 1
    if not full:
        text = text.replace("models.load()", f'models.load("{tiny_llama_dir.as_posix()}")')
    for block in fenced(text, "python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert re.search(r"^[1-9]\d* of \d+ tokens were cached$", capsys.readouterr().out, re.MULTILINE)


def test_version_is_that_of_the_changelog():
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert next(v for v in versions if v != "Unreleased") == kvjax.__version__
