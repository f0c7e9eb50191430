"""Caches in what users write themselves: ``pmap``, ``shard_map``, ``set_mesh`` and refs.

Every case runs a script of ``docs/examples`` and compares its logits with one device's.
"""

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import kvjax
from benchmarks.programs import collectives
from kvjax import models
from kvjax.codecs import Int8
from kvjax.core.pytree import tree_bytes
from kvjax.layouts import Paged, Ring
from tests import laws
from tests.checkpoints import write_llama
from tests.copies import assert_no_copy
from tests.matrix import tiny_config, tiny_model
from tests.meshes import close

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
SCRIPTS = ("own_pmap", "own_shard_map", "own_set_mesh", "cache_in_refs")
TOKENS = np.random.default_rng(0).integers(1, 250, (8, 12)).astype(np.int32)
STEPS, MAX_LEN = 6, 64
POLICIES: dict[str, Any] = {
    "raw": kvjax.CachePolicy(),
    "8 bits": kvjax.policy(bits=8, block=8),
    "ring": kvjax.CachePolicy(Ring(13, slack=11)),
    "paged": kvjax.CachePolicy(Paged(16)),
    "paged, 8 bits": kvjax.CachePolicy(Paged(16), Int8(), Int8(), block=8),
    "bfloat16": kvjax.policy(dtype="bfloat16"),
}
TOLERANCE = {"bfloat16": 1e-3}
"""How close logits come; else 1e-5."""
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}


@functools.cache
def example(name: str) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """A model of one layer, loaded from disk."""
    folder = tmp_path_factory.mktemp("checkpoints") / "llama"
    return models.load(write_llama(folder, num_hidden_layers=1), dtype="float32")


def empty(lm: Any, policy: str, **settings: Any) -> Any:
    return kvjax.init_cache(lm.config, POLICIES[policy], batch=8, max_len=MAX_LEN, **settings)


@pytest.fixture(scope="module")
def wanted(lm):
    """A policy's logits on one device: float32[steps, rows, vocab]."""
    step = jax.jit(lm.apply)

    @functools.cache
    def of(policy: str) -> np.ndarray:
        cache, tokens, found = empty(lm, policy), TOKENS, []
        for _ in range(STEPS):
            logits, cache = step(lm.params, tokens, cache)
            tokens = jnp.argmax(logits[:, -1:], axis=-1)
            found.append(np.asarray(logits[:, -1]))
        return np.stack(found)

    return of


def each(*default: str) -> Any:
    """A test of every policy; those not named are of the shards."""
    return pytest.mark.parametrize(
        "policy",
        [pytest.param(p, marks=[] if p in default else pytest.mark.rare) for p in POLICIES],
    )


def rare(*values: Any) -> list[Any]:
    """Parameters. All but the first run in the shards alone."""
    return [values[0], *(pytest.param(value, marks=pytest.mark.rare) for value in values[1:])]


@pytest.mark.slow
@each("8 bits")
@pytest.mark.parametrize("make", rare("stack_caches", "replicate_cache"))
def test_pmap(lm, wanted, policy, make):
    module = example("own_pmap")
    caches = getattr(module, make)(lm, POLICIES[policy], 1, MAX_LEN)
    found = module.decode(lm, caches, TOKENS[:, None], STEPS)
    close(found[:, :, 0], wanted(policy), TOLERANCE.get(policy, 1e-5))


@each("paged")
@pytest.mark.parametrize("kind", rare(*KINDS))
def test_shard_map(lm, wanted, policy, kind):
    """With ``check_vma``, its default."""
    module = example("own_shard_map")
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(KINDS[kind],), devices=jax.devices()[:4])
    cache = module.make_cache(lm, POLICIES[policy], mesh, 8, MAX_LEN)
    close(
        module.decode(lm, mesh, cache, TOKENS, STEPS), wanted(policy), TOLERANCE.get(policy, 1e-5)
    )


@pytest.mark.rare
@pytest.mark.parametrize("policy", [name for name in POLICIES if "paged" not in name])
def test_shard_map_of_a_cache_of_one_device(lm, wanted, policy):
    """All its arrays are by rows, so it is divided as it is."""
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    close(example("own_shard_map").decode(lm, mesh, empty(lm, policy), TOKENS, STEPS),
          wanted(policy), TOLERANCE.get(policy, 1e-5))  # fmt: skip


@pytest.mark.rare
def test_shard_map_of_a_cache_on_the_host(lm):
    module, policy = example("own_shard_map"), kvjax.CachePolicy(placement=kvjax.Host(), block=8)
    cache = kvjax.init_cache(lm.config, policy, batch=8, max_len=MAX_LEN)
    step, tokens, right = jax.jit(lm.apply), TOKENS, []
    for _ in range(STEPS):
        logits, cache = step(lm.params, tokens, cache)
        tokens = jnp.argmax(logits[:, -1:], axis=-1)
        right.append(np.asarray(logits[:, -1]))
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    cache = module.make_cache(lm, policy, mesh, 8, MAX_LEN)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(cache)}
    assert kinds == {"device", laws.ON_HOST}
    close(module.decode(lm, mesh, cache, TOKENS, STEPS), np.stack(right))


@pytest.mark.slow
@each("ring")
@pytest.mark.parametrize("placed", rare(True, False))
@pytest.mark.parametrize("kind", rare(*reversed(KINDS)))
def test_set_mesh(lm, wanted, policy, placed, kind):
    module = example("own_set_mesh")
    mesh = module.make_mesh(KINDS[kind])
    with jax.set_mesh(mesh):
        cache = empty(lm, policy)
        cache = module.place(cache, mesh) if placed else cache
        found = module.decode(lm, cache, TOKENS, STEPS)
    close(found, wanted(policy), TOLERANCE.get(policy, 1e-5))


@each("raw")
@pytest.mark.parametrize("kind", rare(*KINDS))
def test_set_mesh_of_a_layer_of_ones_own(policy, kind):
    """By ``append``, ``attend`` and ``advance``, and by ``step``."""
    module, config = example("own_set_mesh"), tiny_model(num_hidden_layers=1, windows=(None,))[0]
    rng = np.random.default_rng(1)
    one, more = (
        [rng.normal(size=(8, heads, new, 8)).astype(np.float32) for heads in (4, 2, 2)]
        for new in (1, 12)
    )

    def mixed(put):
        cache = kvjax.init_cache(config.config, POLICIES[policy], batch=8, max_len=MAX_LEN)
        cache, found = put(cache), []
        for call, arrays in ((module.attend_once, more), (module.step_once, one)):
            result, cache = call(cache, *arrays)
            found.append(np.asarray(result))
        return found

    right = mixed(lambda cache: cache)
    mesh = module.make_mesh(KINDS[kind])
    with jax.set_mesh(mesh):
        close(mixed(lambda cache: module.place(cache, mesh)), right)


@pytest.mark.rare
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_set_mesh_around_generate_and_rollout(lm, policy, kind):
    """Log-probabilities equal one device's, also with a cache that the caller placed."""
    prompts, module = TOKENS.tolist(), example("own_set_mesh")
    settings = {"max_new_tokens": 4, "logprobs": True, "eos_token_ids": ()}
    mesh = module.make_mesh(KINDS[kind])

    def told(result):
        return [[score.logprob for score in row] for row in result.logprobs]

    right = kvjax.generate(lm, prompts, cache=POLICIES[policy], **settings)
    drawn = kvjax.rollout(lm, lm.params, prompts, max_new_tokens=4, cache=POLICIES[policy])
    with jax.set_mesh(mesh):
        found = kvjax.generate(lm, prompts, cache=POLICIES[policy], **settings)
        placed = module.place(empty(lm, policy), mesh)
        on_mesh = kvjax.generate(lm, prompts, cache=placed, **settings)
        rolled = kvjax.rollout(lm, lm.params, prompts, max_new_tokens=4, cache=POLICIES[policy])
    assert found.tokens == on_mesh.tokens == right.tokens
    close(told(found), told(right))
    close(told(on_mesh), told(right))
    assert np.array_equal(rolled.tokens, drawn.tokens)
    close(rolled.logprobs, drawn.logprobs)


def refs(cache: Any) -> Any:
    if not hasattr(jax, "new_ref"):
        pytest.skip("this JAX has no jax.new_ref")
    return jax.tree.map(jax.new_ref, cache)


@pytest.mark.slow
@each("8 bits")
def test_refs(lm, wanted, policy):
    held = refs(empty(lm, policy))
    close(
        example("cache_in_refs").decode(lm, held, TOKENS, STEPS),
        wanted(policy),
        TOLERANCE.get(policy, 1e-5),
    )
    cache = jax.tree.map(lambda ref: ref[...], held)
    kvjax.check(cache)
    assert cache.length.tolist() == [TOKENS.shape[1] + STEPS - 1] * 8


COPIED = {
    "raw": lambda size: kvjax.CachePolicy(),
    "8 bits": lambda size: kvjax.policy(bits=8),
    "ring": lambda size: kvjax.CachePolicy(Ring(size // 2, slack=128)),
    "paged": lambda size: kvjax.CachePolicy(Paged(256)),
}


def stepping(policy: str, size: int, place: Any, **settings: Any) -> tuple[Any, Any]:
    """The compiled step of the script, without donation, and the cache that its refs hold."""
    model, params = tiny_model(num_hidden_layers=1, windows=(None,))
    lm = SimpleNamespace(apply=model.apply)
    cache = kvjax.init_cache(model.config, COPIED[policy](size), batch=8, max_len=size, **settings)
    params, cache = place(model, params, cache)
    step = example("cache_in_refs").make_step(lm)
    return step.lower(params, TOKENS[:, :1] % 61, refs(cache)).compile(), cache


@pytest.mark.parametrize("policy", rare(*COPIED))
def test_refs_are_updated_in_place(policy):
    """The copy law: the cache is aliased, and nothing grows with it."""
    temporary = []
    for size in (16384, 65536):
        program, cache = stepping(policy, size, lambda model, *given: given)
        layer = min(tree_bytes(layer) for layer in cache.layers)
        assert_no_copy(program, kvjax.nbytes(cache)["device"], layer)
        temporary.append(program.memory_analysis().temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("policy", rare(*COPIED))
@pytest.mark.parametrize("mesh", rare("kvjax", "set"))
def test_refs_on_a_mesh_exchange_nothing_of_the_cache(policy, mesh):
    """Rows are divided by ``init_cache(mesh=)``, or by the user under ``jax.set_mesh``."""
    if mesh == "kvjax":
        over = kvjax.make_mesh(data=8)

        def place(model, params, cache):
            return jax.device_put(params, model.param_shardings(over)), cache

        program, cache = stepping(policy, 16384, place, mesh=over)
    else:
        own = example("own_set_mesh").make_mesh(AxisType.Auto)
        with jax.set_mesh(own):
            program, cache = stepping(
                policy, 16384,
                lambda model, params, cache: (params, example("own_set_mesh").place(cache, own)),
            )  # fmt: skip
    each = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(cache))
    assert_no_copy(program, each, each)
    assert all(found.bytes <= each // 20 for found in collectives(program))


@pytest.mark.rare
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_by_itself(script):
    """As a user starts it."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, str(EXAMPLES / f"{script}.py")]
    found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert found.stdout.count("[") >= 1


def test_the_page_shows_every_script():
    page = (EXAMPLES.parent / "sharding.md").read_text(encoding="utf-8")
    for script in SCRIPTS:
        assert f"[{script}.py](examples/{script}.py)" in page
        assert len((EXAMPLES / f"{script}.py").read_text(encoding="utf-8").splitlines()) < 120


# Where arrays are committed.

ONE = tiny_config(num_hidden_layers=1, windows=(None,))


def results(cache: Any, folder: Path | None) -> dict[str, Any]:
    """Whether what each function returns is committed, for a cache of one layer. ``load_cache`` is
    included if a folder is given. ``laws.check_operation`` checks operations for every layout and
    codec."""
    keys = jnp.ones((2, 2, 3, 8))
    mixed, call = kvjax.step(kvjax.fork(cache), 3).attend(0, jnp.ones((2, 4, 3, 8)), keys, keys)
    stepped = kvjax.append(kvjax.fork(cache), 0, keys, keys)
    found = {
        "step": (mixed, call.done()),
        "attend": kvjax.attend(jnp.ones((2, 4, 3, 8)), stepped, 0),
        "advance": (advanced := kvjax.advance(stepped, 3)),
        "read": kvjax.read(advanced, 0),
        "rewindable": kvjax.rewindable(advanced),
        "rewind": kvjax.rewind(kvjax.fork(advanced), 1),
        "select": kvjax.select(advanced, [1, 0]),
        "repeat": kvjax.repeat(advanced, 2),
        "reset": kvjax.reset(kvjax.fork(advanced), np.array([True, False])),
        "concatenate": kvjax.concatenate([advanced, advanced]),
        "convert": kvjax.convert(advanced, kvjax.policy("static"), max_len=64),
        "clear_status": kvjax.clear_status(kvjax.fork(advanced)),
        "stack": (stacked := kvjax.stack(advanced)),
        "unstack": kvjax.unstack(stacked),
        "grow": kvjax.grow(kvjax.init_cache(ONE, "dynamic", max_len=2048), 1024),
    }
    if folder is not None:
        kvjax.save_cache(folder / "saved", advanced)
        loaded = kvjax.load_cache(folder / "saved").cache
        laws.same_arrays(loaded, advanced)
        found["load_cache"] = loaded
    return {name: {x.committed for x in jax.tree.leaves(each)} for name, each in found.items()}


@pytest.mark.parametrize("policy", rare("raw", "8 bits", "paged"))
def test_results_are_uncommitted_where_no_device_is_named(tmp_path, policy):
    cache = kvjax.init_cache(ONE, POLICIES[policy], batch=2, max_len=64)
    for name, committed in results(cache, tmp_path).items():
        assert committed == {False}, name


@pytest.mark.rare
def test_results_are_committed_where_a_device_is_named():
    cache = kvjax.init_cache(ONE, batch=2, max_len=64)
    place = SingleDeviceSharding(jax.devices()[0])
    found = results(jax.device_put(cache, place), None)
    del found["grow"]  # of a cache of its own
    for name, committed in found.items():
        assert committed == {True}, name


@pytest.mark.rare
def test_generated_caches_are_uncommitted_where_no_device_is_named(lm):
    """And committed where the model's parameters are."""
    made = kvjax.generate(lm, TOKENS.tolist(), max_new_tokens=2, cache="static").cache
    rolled = kvjax.rollout(lm, lm.params, TOKENS.tolist(), max_new_tokens=2)
    assert {x.committed for x in jax.tree.leaves((made, rolled))} == {False}
    whole = NamedSharding(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)), P())
    placed = lm.with_params(jax.device_put(lm.params, whole))
    made = kvjax.generate(placed, TOKENS.tolist(), max_new_tokens=2, cache="static").cache
    assert {x.committed for x in jax.tree.leaves(made)} == {True}
