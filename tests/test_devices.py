"""The copy law on TPUs and GPUs, by their own compilers: nothing here runs on one."""

import dataclasses
import functools

import pytest

import kvjax
from benchmarks.abstract import CHUNK, FEATURES, LOOP, POLICIES, STEP, Cell, cell_of, compiled
from benchmarks.devices import LIMITS, LONG, SHARE
from kvjax.core.absent import KINDS, absent, check_compiler, device_of, is_absent, kind_of
from kvjax.core.errors import MissingCompilerError
from kvjax.memory.devices import plan_on
from kvjax.memory.shapes import SHAPES
from tests.conftest import FULL

BLOCK = 8 * 8 * 64 * 128 * 4
"""Bytes of a block of every row in float32: temporaries of a step may take two of them where the
cache is small, keys and values while they are encoded, and, mixed by a rotation, four; they do not
grow with the capacity."""


@functools.cache
def missing(device):
    """Why nothing is compiled for a device here; None if it is."""
    try:
        check_compiler(KINDS[device].platform)
    except MissingCompilerError as error:
        return str(error)
    return None


def needs(device):
    return pytest.mark.skipif(missing(device) is not None, reason=str(missing(device)))


def devices(*names):
    return [pytest.param(name, marks=needs(name)) for name in names]


SOME = [
    # Every policy, every form and every shape, once or more often.
    ("raw", "8,192", STEP), ("raw", "64 channels", STEP), ("raw", "one head of keys", CHUNK),
    ("raw", "256 channels", LOOP), ("growing", "8,001 slots", STEP), ("sinks", "8,192", STEP),
    ("sinks", "8,192", LOOP), ("8 bits", "8,192", LOOP), ("8 bits", "8,192", CHUNK),
    ("4 bits", "8,192", STEP), ("4 bits", "32,768", CHUNK), ("4 bits", "as many as queries'", STEP),
    ("4 and 2 bits", "8,192", LOOP), ("2 bits", "8,192", STEP), ("float8", "8,192", STEP),
    ("rotated", "8,192", STEP),
]  # fmt: skip
"""The covering set of the law for devices; all of it is in ``.ci/run --full``."""
EVERY = [
    (policy, feature, form)
    for policy in POLICIES
    for feature in FEATURES
    for form in (STEP, LOOP, CHUNK)
    if "host" not in policy
]


@functools.cache
def found(device, policy, form, **feature):
    return compiled(dataclasses.replace(Cell(POLICIES[policy], form), **feature), device)


@pytest.mark.parametrize("device", devices("v5e", "h200", *(["v6e"] if FULL else [])))
@pytest.mark.parametrize(("policy", "feature", "form"), EVERY if FULL else SOME)
def test_the_copy_law(device, policy, feature, form):
    """Aliased whole, nothing of half a layer, and few temporaries."""
    program = compiled(cell_of(policy, feature, form), device)
    assert program.whole
    # Results as large as the queries of 512 tokens are theirs.
    assert program.large == [] or form == CHUNK
    if form == CHUNK:
        assert program.temporaries <= LONG * program.queries
    else:
        constant = (4 if policy == "rotated" else 2) * BLOCK
        assert program.temporaries <= max(SHARE * sum(program.cache.values()), constant)


@pytest.mark.parametrize("device", devices("v5e", "h200"))
@pytest.mark.parametrize("policy", ["raw", "8 bits", "4 bits"])
def test_temporaries_do_not_grow_with_the_capacity(device, policy):
    short, long = (
        compiled(Cell(POLICIES[policy], STEP, max_len=tokens), device).temporaries
        for tokens in (8192, 32768)
    )
    assert abs(long - short) < 2**18  # a few numbers a tile, rounded up to the compiler's pieces


@pytest.mark.parametrize("device", devices("v5e", "h200"))
@pytest.mark.parametrize("policy", LIMITS)
def test_bytes_that_a_step_moves(device, policy):
    """Over weights and cache, once; in the shape of Llama 3 8B, behind full rows."""
    plan = plan_on(SHAPES["llama-3-8b"], POLICIES[policy], device=device, batch=8, max_len=8192)
    assert 0.95 < plan.moved / plan.ideal < LIMITS[policy]
    assert plan.fits is (device == "h200")


@pytest.mark.parametrize("name", devices(*KINDS))
def test_kinds_of_devices(name):
    device = absent(name)
    assert kind_of(device) == KINDS[name] and is_absent(device)
    assert device_of(name) == device == device_of(device)


def test_what_is_no_device():
    with pytest.raises(ValueError, match=r"unknown device 'v4': there are v5e"):
        absent("v4")
    with pytest.raises(ValueError, match="a topology or a name"):
        device_of(3)
    assert device_of(None) is None


def test_a_compiler_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingCompilerError, match="for a tpu needs libtpu"):
        check_compiler("tpu")
    with pytest.raises(ImportError, match="pip install --no-deps jax-cuda12-plugin=="):
        check_compiler("gpu")


@pytest.mark.parametrize("device", devices("h200"))
def test_a_host_that_a_compiler_does_not_know_is_refused(device):
    with pytest.raises(ValueError, match="caches on the host can't be compiled for"):
        plan_on(SHAPES["gpt2"], kvjax.policy("offloaded_static"), device=device, max_len=1024)
