"""What all tests share: shapes checked at run time, sizes, compiled programs kept, a tiny model."""

import importlib.util
import os
from pathlib import Path

import hypothesis
import pytest
from jaxtyping import install_import_hook

import tests.shapes  # noqa: F401  # the hook below calls it by name
from tests.checkpoints import write_llama, write_tokenizer

ROOT = Path(__file__).resolve().parents[1]

# Both must stand before the first import of jax and of kvjax. Compiled programs are kept between
# runs, for the commands and notebooks that the tests start too.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
FULL = os.environ.get("KVJAX_FULL") == "1"
"""Whether the larger sizes of the same laws are asked for (``.ci/run --full``)."""

# Compiling takes most of the tests' time, and half of that is spent on code that runs once. A flag
# that is set already stays: `.ci/run` compiles as users do for the newest JAX and for the oracle.
_FLAGS = os.environ.get("XLA_FLAGS", "")
if not FULL and "xla_backend_optimization_level" not in _FLAGS:
    _FLAGS += " --xla_backend_optimization_level=0"
# Meshes of simulated devices; what is not about them uses the first alone.
if "xla_force_host_platform_device_count" not in _FLAGS:
    _FLAGS += " --xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = _FLAGS.strip()

install_import_hook("kvjax", "tests.shapes.check")

hypothesis.settings.register_profile("plain", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("full", max_examples=400, deadline=None, derandomize=True)
hypothesis.settings.load_profile("full" if FULL else "plain")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what stands in ``tests/oracle`` or says that it needs the extra."""
    for item in items:
        reasons = [str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skipif")]
        if ROOT / "tests" / "oracle" in item.path.parents or any("`oracle`" in r for r in reasons):
            item.add_marker("oracle")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked ``oracle`` where the oracle is not installed."""
    if item.get_closest_marker("oracle"):
        for module in ("torch", "transformers"):
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"needs {module} (the extra `oracle`)")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Forget a file's compiled programs: each is memory maps, of which a process has only so many
    (a compiler that gets no more of them crashes)."""
    yield
    import jax

    jax.clear_caches()


@pytest.fixture(autouse=True)
def forget_programs_of_meshes(request: pytest.FixtureRequest):
    """The same after every test on a mesh, whose programs have many times the maps of others."""
    yield
    if request.path.stem.startswith("test_mesh"):
        import jax

        jax.clear_caches()


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
