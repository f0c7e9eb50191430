"""A cache on a mesh: its operations, its moves, and what is refused."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax.codecs import Raw
from kvjax.core.compat import has_triton
from kvjax.layouts import Dense, Growing, Ring
from kvjax.placement.mesh import parse_mesh, shard_over
from tests import laws
from tests.matrix import CODECS, FULL, tiny_config
from tests.meshes import HEADS, MAX_LEN, ROWS, SHAPES, close, mesh, model_of

# Meshes as users have them.


def test_wrong_meshes_are_refused():
    config = model_of("grouped")[0].config
    devices = np.array(jax.devices()[:2])
    make = functools.partial(kvjax.init_cache, config, max_len=MAX_LEN, batch=ROWS)
    with pytest.raises(ValueError, match="axis 'model': kvjax supports data, tensor, sequence"):
        make(mesh=Mesh(devices, ("model",)))
    with pytest.raises(ValueError, match=r"no pipeline parallelism.*use tensor"):
        make(mesh=Mesh(devices, ("pipeline",)))
    with pytest.raises(ValueError, match="7 rows can't be divided among data=2"):
        make(mesh=Mesh(devices, ("data",)), batch=7)
    with pytest.raises(ValueError, match=r"mesh must be a jax.sharding.Mesh"):
        make(mesh="tensor=2")
    for wrong in ({"tensor": 2}, [2]):
        with pytest.raises(ValueError, match=r"mesh must be a jax.sharding.Mesh"):
            make(mesh=wrong)
    for wrong in (4, [jax.devices()[0]] * 2):
        with pytest.raises(ValueError, match=r"devices must be a list of different jax\.Device"):
            kvjax.make_mesh(tensor=2, devices=wrong)
    with pytest.raises(ValueError, match="unknown device 'cpu': choose one of v5e, v6e, v5p"):
        kvjax.make_mesh(tensor=2, devices="cpu")
    assert kvjax.make_mesh(tensor=2, devices=devices.reshape(1, 2)).size == 2
    with pytest.raises(ValueError, match="needs 16 devices, but there are 8"):
        kvjax.make_mesh(tensor=16)
    with pytest.raises(ValueError, match="tensor must be an integer >= 1, got 0"):
        kvjax.make_mesh(tensor=0)
    for wrong in ("tensor", "tensor=2,tensor=2", "tensor=two", "tensor=-1", "data=2,", ""):
        with pytest.raises(ValueError, match="a mesh must be auto, or sizes of axes such as"):
            parse_mesh(wrong)
    assert parse_mesh("tensor =2") == {"tensor": 2}
    assert parse_mesh("tensor=2, data=4") == {"tensor": 2, "data": 4}


@pytest.mark.rare
@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Slopes:
    """A bias that is a pytree with an array and a field that is not one, and whose length is 0."""

    slopes: Any
    name: str = "slopes"
    times: int = 2

    def __call__(self, queries: Any, keys: Any) -> Any:
        assert self.name == "slopes" and self.times > 1
        return self.slopes[:, None, None] * (keys[:, None, :] - queries[:, :, None])[:, None]

    def __len__(self) -> int:
        return 0

    def tree_flatten(self) -> Any:
        return (self.slopes, self.name, self.times), None

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> "Slopes":
        return cls(*leaves)


def unhashable(slopes):
    """A bias that is a pytree of an array, of a form that has no hash."""

    class Listed(Slopes):
        pass

    def made(rest: Any, own: Any) -> Listed:
        return Listed(*own, *rest)

    jax.tree_util.register_pytree_node(Listed, lambda x: ((x.slopes,), ["slopes", 2]), made)
    return Listed(slopes)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["partial", "pytree", "function", "unhashable", "closure"])
def test_forms_of_a_bias(form):
    """On a mesh, as on one device: the arrays of a pytree are each device's."""
    config, slopes = tiny_config(windows=(None, None)), jnp.arange(1.0, 5.0)
    queries = np.random.default_rng(0).normal(size=(2, 4, 5, 8)).astype(np.float32)

    def mixed(cache, slopes):
        bias = Slopes(slopes)
        if form == "partial":
            bias = jax.tree_util.Partial(lambda s, *at: Slopes(s)(*at), slopes)
        if form == "closure":
            bias = jax.tree_util.Partial(lambda s, *at: Slopes(s + slopes)(*at), 0 * slopes)
        if form == "unhashable":
            bias = unhashable(slopes)
        if form == "function":
            bias = functools.partial(Slopes.__call__, bias)
        return kvjax.step(cache, 5).attend(0, queries, queries[:, :2], queries[:, 2:], bias=bias)[0]

    def of(over):
        cache = kvjax.init_cache(config, batch=2, max_len=64, mesh=over)
        return jax.jit(mixed)(cache, slopes)

    wanted = of(None)
    assert np.allclose(of(kvjax.make_mesh(data=2, tensor=2)), wanted, atol=1e-6)
    plain = jax.jit(mixed)(kvjax.init_cache(config, batch=2, max_len=64), 0 * slopes)
    assert np.max(np.abs(plain - wanted)) > 0.1


@pytest.mark.slow
def test_a_bias_is_of_a_devices_heads():
    rng = np.random.default_rng(0)
    slopes = jnp.asarray(rng.normal(size=(1, 8, 1, 1)), jnp.float32)

    def bias(queries, keys):
        return slopes * (keys[:, None, None, :] - queries[:, None, :, None]).astype(jnp.float32)

    def mixed(over, heads):
        config = model_of(heads)[0].config
        cache = kvjax.init_cache(config, "static", batch=2, max_len=MAX_LEN, mesh=over)
        rng = np.random.default_rng(1)
        keys, values = rng.normal(size=(2, 2, HEADS[heads], 9, 8)).astype(np.float32)
        queries = rng.normal(size=(2, 8, 9, 8)).astype(np.float32)

        @jax.jit
        def call(cache, slope):
            cache = kvjax.append(cache, 0, keys, values)
            scaled = lambda q, k: slope * bias(q, k)  # noqa: E731
            return kvjax.attend(queries, cache, 0, bias=scaled)

        return np.asarray(call(cache, jnp.float32(0.1)))

    for heads in HEADS:
        wanted = mixed(None, heads)
        for sizes in ({"tensor": 8}, {"data": 2, "tensor": 2, "sequence": 2}):
            close([mixed(kvjax.make_mesh(**sizes), heads)], [wanted])


@pytest.mark.slow(but=("2-2-2",))
@pytest.mark.parametrize("shape", SHAPES)
def test_paths_agree_on_a_mesh(shape):
    config = tiny_config(num_hidden_layers=1, windows=(None,))
    cache = kvjax.init_cache(config, "static", batch=8, max_len=600, mesh=mesh(shape))
    rng = np.random.default_rng(1)
    keys, values = rng.normal(size=(2, 8, 2, 333, 8)).astype(np.float32)
    queries = rng.normal(size=(8, 8, 1, 8)).astype(np.float32)

    @jax.jit
    def call(cache):
        held = kvjax.advance(kvjax.append(cache, 0, keys[:, :, 1:], values[:, :, 1:]), 332)
        held = kvjax.append(held, 0, keys[:, :, :1], values[:, :, :1])
        # Mosaic's kernel for GPUs takes no heads of 8 channels; it is compiled in test_devices.py.
        kernels = ("pallas",) if has_triton() else ()
        paths = ("reference", "blocks", "buckets", *kernels)
        return [kvjax.attend(queries, held, 0, path=path) for path in paths]

    found = [np.asarray(x) for x in call(cache)]
    close(found[1:], found[:1] * (len(found) - 1))


# Operations, and moves between meshes.


@functools.cache
def _filled(name, shape):
    config, over = model_of("grouped")[0].config, None if shape is None else mesh(shape)
    cache = kvjax.init_cache(config, SOME[name], batch=ROWS, max_len=MAX_LEN, mesh=over)
    return fed(cache, range(0, 24, 8))


def filled(name, shape=None):
    """A cache of 24 tokens a row on such a mesh, or on one device."""
    return kvjax.fork(_filled(name, shape))


@jax.jit
def _call(cache, keys, values):
    for layer in range(2):
        cache = kvjax.append(cache, layer, keys[layer], values[layer])
    return kvjax.advance(cache, keys.shape[3])


def fed(cache, starts):
    """Eight tokens more for each of ``starts``."""
    for start in starts:
        rng = np.random.default_rng(start)
        keys, values = rng.normal(size=(2, 2, ROWS, 2, 8, 8)).astype(np.float32)
        cache = _call(cache, keys, values)
    return cache


def with_room(cache):
    short = cache.grows_to is not None and int(np.max(cache.length)) + 8 > cache.max_len
    return kvjax.grow(cache, MAX_LEN) if short else cache


@jax.jit
def seen(cache):
    rng = np.random.default_rng(99)
    queries = jnp.asarray(rng.normal(size=(2, ROWS, 8, 1, 8)), jnp.float32)
    return [kvjax.attend(queries[layer], cache, layer, causal=False) for layer in range(2)]


SOME = {
    "dense": kvjax.policy("static"),
    "growing": kvjax.CachePolicy(Growing(start=24)),
    "ring-sinks": kvjax.policy("sliding_window", window=11, sinks=3, slack=9),
    "int4": kvjax.CachePolicy(Dense(), CODECS["int4"], CODECS["int8"], block=8),
    "ring-host": kvjax.CachePolicy(
        Ring(11, sinks=3, slack=17),
        CODECS["int4-tensor"],
        placement=kvjax.Host(),
        block=8,
    ),
}
CHANGES = {
    "select": lambda c: kvjax.select(c, [3, 1, 7, 0, 0, 2, 5, 4]),
    "rewind": lambda c: kvjax.rewind(c, np.array([0, 1, 2, 3, 1, 1, 2, 0])),
    "repeat": lambda c: kvjax.select(kvjax.repeat(c, 2), np.arange(1, 17, 2)),
    "concatenate": lambda c: kvjax.select(kvjax.concatenate([c, c]), np.arange(4, 12)),
    "reset": lambda c: kvjax.reset(c, np.arange(ROWS) % 2 == 0),
    "convert": lambda c: kvjax.convert(
        c,
        [kvjax.CachePolicy(Ring(7), Raw("float32"), Raw("float32"))] * 2,
    ),
}
"""Each in one program; eager ones do the same: see below."""
EVERY = {name: jax.jit(change) for name, change in CHANGES.items()} | {
    "grow": lambda c: c if c.grows_to is None else kvjax.grow(c, 40),
    "select-eager": lambda c: kvjax.select(c, [3, 1, 7, 0, 0, 2, 5, 4]),
}


RARE = {
    *((name, "2-2-2") for name in ("int4", "dense", "growing", "ring-sinks")),
    ("int4", "1-1-8"),
    *(("ring-host", shape) for shape in ("1-1-8", "2-2-2")),
}


@pytest.mark.slow(but=("dense-1-1-8",))
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(*cell, marks=[pytest.mark.rare] * (cell in RARE))
        for cell in itertools.product(SOME, ("1-1-8", "2-2-2"))
    ],
)
def test_operations_are_those_of_one_device(name, shape):
    """Every one on every policy, on one of the two meshes; a full run has both."""
    turn = list(SOME).index(name) + (shape == "2-2-2")
    for change in list(EVERY.values())[slice(None) if FULL else slice(turn % 2, None, 2)]:
        alone, spread = filled(name), filled(name, shape)
        over = spread.mesh_sharding.mesh
        wanted, found = change(alone), change(spread)
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves(found)} == {over}
        wanted, found = (fed(with_room(cache), [50]) for cache in (wanted, found))
        assert np.array_equal(wanted.length, found.length)
        close([np.asarray(x) for x in seen(found)], [np.asarray(x) for x in seen(wanted)])
        kvjax.check(found)


INSIDE = {
    "select": lambda c: kvjax.select(c, [3, 1, 7, 0, 0, 2, 5, 4]),
    "repeat": lambda c: kvjax.repeat(c, 2),
    "concatenate": lambda c: kvjax.concatenate([c, c]),
    "rewind": lambda c: kvjax.rewind(c, 1),
    "reset": kvjax.reset,
    "clear_status": kvjax.clear_status,
    "convert": lambda c: kvjax.convert(
        c,
        kvjax.CachePolicy(Ring(7), Raw("float32"), Raw("float32")),
    ),
    "init_cache": lambda c: kvjax.init_cache(
        model_of("grouped")[0].config, "static", batch=8, max_len=32, mesh=mesh("2-2-2")
    ),
}
"""What may stand inside ``jit``, where the compiler has a say in where results are."""


HELD = ("dense", "int4", "ring-host")
TURNS = [(name, HELD[(number + n) % 3]) for n in range(3) for number, name in enumerate(INSIDE)]
"""Every operation with every policy; the first of them have each once."""


FURTHER = [pytest.param(*each, marks=pytest.mark.rare) for each in TURNS[len(INSIDE) :]]


@pytest.mark.slow(
    but=("clear_status-ring-host", "init_cache-int4", "reset-int4", "rewind-dense", "select-dense")
)
@pytest.mark.parametrize(("operation", "name"), [*TURNS[: len(INSIDE)], *FURTHER])
def test_an_operation_inside_jit_leaves_each_device_its_share(operation, name):
    cache = filled(name, "2-2-2")
    change = INSIDE[operation]
    wanted, found = change(cache), jax.jit(change)(cache)
    for alone, inside in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert inside.sharding == alone.sharding
        assert np.array_equal(np.asarray(inside), np.asarray(alone))


def spread_of(over):
    return None if over is None else shard_over(over, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "dense",
        *(
            pytest.param(name, marks=pytest.mark.rare)
            for name in ("ring-sinks", "ring-host", "int4", "growing")
        ),
    ],
)
def test_a_text_goes_on_on_another_mesh(name):
    """Each policy on two of the meshes after another, and at last on the host of a third; in a full
    run on all."""
    sizes = [{"sequence": 8}, None, {"data": 2, "tensor": 2, "sequence": 2}, {"sequence": 3}, {}]
    turn = list(SOME).index(name)
    sizes = [*sizes[turn:], *sizes[:turn]][: None if FULL else 2]
    cache, alone = filled(name, "1-1-8" if turn % 2 else "2-2-2"), filled(name)
    for number, some in enumerate(sizes):
        over = None if some is None else kvjax.make_mesh(**some)
        before, same = jax.tree.leaves(cache), cache.mesh_sharding == spread_of(over)
        cache = kvjax.migrate(cache, mesh=over)
        assert same or any(array.is_deleted() for array in before)
        assert cache.mesh_sharding == spread_of(over)
        alone, cache = (fed(with_room(each), [70 + number]) for each in (alone, cache))
        close([np.asarray(x) for x in seen(cache)], [np.asarray(x) for x in seen(alone)])
    cache = kvjax.migrate(cache, kvjax.Host(), mesh=mesh("1-1-8"))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(cache.layers[0].keys)}
    assert kinds == {laws.ON_HOST}
    close([np.asarray(x) for x in seen(cache)], [np.asarray(x) for x in seen(alone)])


def test_wrong_moves_are_refused():
    cache = filled("dense", "2-2-2")
    with pytest.raises(ValueError, match="give layers or mesh, not both"):
        kvjax.migrate(cache, layers=[0], mesh=None)
    with pytest.raises(ValueError, match="8 rows can't be divided among data=3"):
        kvjax.migrate(cache, mesh=kvjax.make_mesh(data=3))
    with pytest.raises(ValueError, match=r"on different devices: use kvjax\.migrate"):
        kvjax.concatenate([cache, filled("dense")])
    with pytest.raises(ValueError, match="3 rows can't be divided among data=2"):
        kvjax.select(cache, [0, 1, 2])


@pytest.mark.slow
def test_more_rows_are_selected_of_pages_on_a_mesh(tiny_llama):
    """Each device's pool grows with its rows."""
    lm = tiny_llama.on(kvjax.make_mesh(data=2))
    policy = kvjax.policy("paged", page_size=16)
    cache = kvjax.init_cache(lm.config, policy, batch=2, max_len=64, mesh=lm.mesh)
    tokens = np.random.default_rng(0).integers(1, 200, (2, 40)).astype(np.int32)
    _, cache = lm.apply(lm.params, tokens, cache)
    for select in (kvjax.select, jax.jit(kvjax.select)):
        selected = select(cache, np.array([0, 0, 1, 1, 0, 1], np.int32))
        kvjax.check(selected)
        assert np.asarray(selected.length).tolist() == [40] * 6
