"""What all tests share: shapes checked at run time, sizes, compiled programs kept, a tiny model."""

import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import zlib
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import shapes
from tests.checkpoints import write_llama, write_tokenizer

ROOT = Path(__file__).resolve().parents[1]

# Both must stand before the first import of jax and of kvjax. Compiled programs are kept between
# runs, for the commands and notebooks that the tests start too.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
FULL = os.environ.get("KVJAX_FULL") == "1"
"""Whether the larger sizes of the same laws are asked for (``.ci/run --full``)."""
SLOW = os.environ.get("KVJAX_SLOW", "")
"""``1``: the slow tests run too; ``only``: nothing but them, which is what ``.ci/run`` adds to the
README's command; empty: they are left out."""

MODES = {
    "x64": ("JAX_ENABLE_X64", "1"),
    "rank": ("JAX_NUMPY_RANK_PROMOTION", "raise"),
    "dtype": ("JAX_NUMPY_DTYPE_PROMOTION", "strict"),
    "transfer": ("JAX_TRANSFER_GUARD", "disallow"),
}
"""What ``KVJAX_MODE`` sets for all tests: laws hold with 64 bits too. Most tests' own code is not
written for the others, under which ``tests/test_modes.py`` does what users do."""
if _mode := os.environ.get("KVJAX_MODE"):
    os.environ.__setitem__(*MODES[_mode])

# Compiling takes most of the tests' time, and most of that is spent on code that runs once. A run
# with a level of its own compiles as that says: see `.ci/run --full`.
_FLAGS = os.environ.get("XLA_FLAGS", "")
if "xla_backend_optimization_level" not in _FLAGS:
    _FLAGS += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    _FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
    # A compiler aborts on a flag that it does not know: this one's are known up to JAX 0.10.
    if importlib.metadata.version("jax").startswith("0.10."):
        _FLAGS += " --xla_cpu_use_fusion_emitters=false"
# Meshes of simulated devices; what is not about them uses the first alone.
if "xla_force_host_platform_device_count" not in _FLAGS:
    _FLAGS += " --xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = _FLAGS.strip()

shapes.install()

hypothesis.settings.register_profile("plain", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("full", max_examples=400, deadline=None, derandomize=True)
hypothesis.settings.load_profile(PROFILE := "full" if FULL else "plain")
# What `python -m tests.planted_faults` asks for: the first failure, however long it is to read.
hypothesis.settings.register_profile(
    "unshrunk",
    hypothesis.settings.get_profile(PROFILE),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate],
)


def pytest_configure(config: pytest.Config) -> None:
    """The marks of what shards run, and the counting of programs."""
    config.addinivalue_line("markers", "cells: a cell of the law matrix (tests/matrix.py)")
    config.addinivalue_line(
        "markers", "slow(but): left out by the README's command, but for these parameters"
    )
    config.addinivalue_line("markers", "part: of which `.ci/run` runs one part for each commit")
    config.addinivalue_line("markers", "rare: of one of the shards, and of a full run, alone")
    if SLOW not in ("", "1", "only"):
        raise pytest.UsageError(f"KVJAX_SLOW is {SLOW!r}; it is '1', 'only' or empty")
    if os.environ.get("KVJAX_COUNT") == "1":
        from tests import counted

        config.pluginmanager.register(counted.Counts())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that were asked for, and mark those that compare with Transformers: what
    stands in ``tests/oracle`` or says that it needs the extra."""
    kept = [item for item in items if wanted(item)]
    config.hook.pytest_deselected(items=[*set(items).difference(kept)])
    items[:] = kept
    items[:] = beside_their_like(items)
    for item in items:
        reasons = [str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skipif")]
        if ROOT / "tests" / "oracle" in item.path.parents or any("`oracle`" in r for r in reasons):
            item.add_marker("oracle")


def wanted(item: pytest.Item) -> bool:
    """Whether the environment asks for a test. Of a shard (``KVJAX_SHARD=k/n``) these are its cells
    of the law matrix and its rare tests alone; with ``KVJAX_CELLS=k/n`` one part alone of the
    cells, and all that is no cell; with ``KVJAX_PART=k/n`` one part of the tests with the mark
    ``part``, and all others. With ``KVJAX_SLOW=only`` as well, it is one part of all slow tests."""

    def has(mark: str) -> bool:
        return item.get_closest_marker(mark) is not None

    def of_part(part: str) -> bool:
        number, parts = map(int, part.split("/"))
        return zlib.crc32(item.nodeid.encode()) % parts == number % parts

    if (cells := os.environ.get("KVJAX_CELLS")) and has("cells") and not of_part(cells):
        return False
    divided = SLOW == "only" or has("part")
    if (part := os.environ.get("KVJAX_PART")) and divided and not of_part(part):
        return False
    if shard := os.environ.get("KVJAX_SHARD"):
        return has("cells") or (has("rare") and of_part(shard))
    if FULL:
        return True
    if has("rare"):
        return False
    return SLOW == "1" or is_slow(item) == (SLOW == "only")


def is_slow(item: pytest.Item) -> bool:
    """Whether a test has the mark ``slow``, and is none of the parameters that it names in ``but``:
    those are the ones that the README's command runs of it."""
    mark = item.get_closest_marker("slow")
    parameters = getattr(item, "callspec", None)
    return mark is not None and (
        parameters is None or parameters.id not in mark.kwargs.get("but", ())
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the README's command leaves out, and how to run it."""
    if not (FULL or SLOW or os.environ.get("KVJAX_SHARD")):
        terminalreporter.write_line(
            "Left out: slow tests (KVJAX_SLOW=1 runs them too) and the shards' (KVJAX_FULL=1, all)."
        )


def beside_their_like(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those of a file that are about the same cell one after the other: one worker makes what they
    share."""
    found: dict[object, list[pytest.Item]] = {}
    for item in items:
        cell = getattr(item, "callspec", None) and item.callspec.params.get("cell")
        found.setdefault((item.path, cell) if cell is not None else item, []).append(item)
    return [item for some in found.values() for item in some]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage less often: tracing makes many objects, and next to none in circles."""
    gc.freeze()
    gc.set_threshold(500_000, 20, 50)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked ``oracle`` where the oracle is not installed."""
    if item.get_closest_marker("oracle"):
        for module in ("torch", "transformers"):
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"needs {module} (the extra `oracle`)")


MAPS = Path("/proc/self/maps")
MOST_MAPS = 40_000
"""Above which compiled programs are forgotten: each is memory maps, of which a process may have
65,530 (``vm.max_map_count``); a compiler that gets no more of them crashes."""
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
MORE_PAGES = os.sysconf("SC_PHYS_PAGES") // (4 * max(WORKERS, 2))
"""Of memory, by which a process may grow until it forgets them: a quarter of it, of which the
processes that run side by side have a part each."""


def resident_pages() -> int:
    """Of this process, where the system says."""
    return int(MAPS.with_name("statm").read_text().split()[1]) if MAPS.exists() else 0


@pytest.fixture(autouse=True, scope="session")
def pages_before() -> list[int]:
    """When programs were forgotten last."""
    return [resident_pages()]


@pytest.fixture(autouse=True)
def forget_programs(pages_before: list[int]):
    """Forget compiled programs where they have become too many."""
    yield
    grown = resident_pages() - pages_before[0] > MORE_PAGES
    if grown or (MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS):
        import jax

        jax.clear_caches()
        gc.collect()
        # What programs leave behind is handed back to the system, where its library can.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
        pages_before[0] = resident_pages()


@pytest.fixture(scope="session")
def full() -> bool:
    """Whether ``.ci/run --full`` runs: larger sizes of the same laws."""
    return FULL


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory):
    """A token a byte, and 256 and 257 to begin and end a text."""
    from kvjax.models.text import read_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return read_tokenizer(folder)


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte-level tokenizer and a chat template, on disk."""
    return write_llama(tmp_path_factory.mktemp("checkpoints") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_llama(tiny_llama_dir: Path):
    """The model of ``tiny_llama_dir``, loaded in float32."""
    from kvjax import models

    return models.load(str(tiny_llama_dir), dtype="float32")


@pytest.fixture(scope="session")
def embedded():
    """The model that comes with kvjax, loaded in float32."""
    from kvjax import models

    return models.load(dtype="float32")
