"""Stacked caches: a user's scan over the layers, in place, and operations on such caches.

``test_recompute.py`` holds the laws for the layers of a stack."""

import ast
import functools
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core.pytree import tree_bytes
from kvjax.layouts import Paged, Ring
from tests import laws
from tests.copies import assert_no_copy
from tests.matrix import BLOCK, CODECS, some, tiny_config

ROOT = Path(__file__).resolve().parents[1]
LAYERS, KV, HEADS, DIM, ROWS = 4, 2, 4, 8, 3
WIDTH = (HEADS + 2 * KV) * DIM
EMBEDDED = np.random.default_rng(1).normal(size=(61, HEADS * DIM)).astype(np.float32)
TEXT = np.random.default_rng(2).integers(0, 61, (ROWS, 64)).astype(np.int32)
INT8 = kvjax.CachePolicy(keys=CODECS["int8"], values=CODECS["int8"], block=BLOCK)

POLICIES = {
    "raw": kvjax.CachePolicy(),
    "int8": INT8,
    "sinks": kvjax.CachePolicy(
        Ring(20, sinks=3, slack=15), CODECS["int4"], CODECS["int4"], block=BLOCK
    ),
    "host": replace(INT8, placement=kvjax.Host(1)),
    "pages": kvjax.CachePolicy(Paged(16)),
    "pages of 8 bits": replace(INT8, layout=Paged(16)),
}


@functools.cache
def weights(layers=LAYERS):
    """Per layer: projections to queries, keys and values, and the output projection."""
    rng = np.random.default_rng(0)
    shapes = (layers, HEADS * DIM, WIDTH), (layers, HEADS * DIM, HEADS * DIM)
    return tuple(rng.normal(size=shape).astype(np.float32) / 6 for shape in shapes)


def layer(x, call, weight, number):
    """A layer of a model; its index may be traced."""
    into, back = weight
    numbers = (x @ into).reshape(*x.shape[:2], -1, DIM).swapaxes(1, 2)
    queries, keys, values = jnp.split(numbers, (HEADS, HEADS + KV), axis=1)
    mixed, call = call.attend(number, queries, keys, values, rotary=laws.TABLE)
    return x + mixed.swapaxes(1, 2).reshape(x.shape) @ back, call


def scanned(params, tokens, cache=None, lengths=None):
    """A model with stacked layers, which carries the cache."""

    def one(carry, xs):
        return layer(*carry, *xs), None

    begun = jnp.asarray(EMBEDDED)[tokens], kvjax.step(cache, tokens, lengths=lengths)
    (x, call), _ = jax.lax.scan(one, begun, (params, jnp.arange(len(params[0]))))
    return x, call.done()


def unrolled(params, tokens, cache=None, lengths=None):
    """The same model, layer by layer."""
    x, call = jnp.asarray(EMBEDDED)[tokens], kvjax.step(cache, tokens, lengths=lengths)
    for number in range(len(params[0])):
        x, call = layer(x, call, jax.tree.map(lambda w, n=number: w[n], params), number)
    return x, call.done()


def config(layers=LAYERS, windows=None):
    windows = windows or (None,) * layers
    return tiny_config(num_hidden_layers=layers, windows=windows, num_key_value_heads=KV)


def empty(name="raw", layers=LAYERS, batch=ROWS, max_len=64, **more):
    given = {"batch": batch, "max_len": max_len, "stacked": True, **more}
    return kvjax.init_cache(config(layers), POLICIES.get(name, name), **given)


SCANNED, UNROLLED = jax.jit(scanned), jax.jit(unrolled)


def filled(name, model=SCANNED, *, stacked=True, **more):
    """A cache with rows of 30, 25 and 9 tokens, filled by three calls."""
    cache = empty(name, stacked=stacked, **more)
    for start, taken in ((0, (16, 16, 9)), (16, (14, 9, 0))):
        _, cache = model(weights(), TEXT[:, start : start + 16], cache, np.array(taken, np.int32))
    return cache


@pytest.mark.parametrize("name", ["raw", "sinks"])
def test_rewindable_has_a_number_per_row(name):
    found, wanted = (
        kvjax.rewindable(filled(name, model, stacked=stacked))
        for model, stacked in ((SCANNED, True), (UNROLLED, False))
    )
    assert found.shape == (3,) and found.tolist() == wanted.tolist()


def goes_on(cache, model=None):
    """The logits of three more tokens."""
    model = model or (UNROLLED if cache.stacks is None else SCANNED)
    found, cache = model(weights(), TEXT[: cache.batch, 40:43], cache)
    kvjax.check(cache)
    return np.asarray(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(POLICIES, "raw"))
def test_a_scan_over_layers_is_the_same_as_one_after_the_other(name):
    stacked, alone = filled(name), filled(name, UNROLLED, stacked=False)
    kvjax.check(stacked)
    assert stacked.length.tolist() == [30, 25, 9] and stacked.max_len == alone.max_len
    wanted = goes_on(alone)
    laws.close(goes_on(stacked), wanted, 1e-6)
    laws.close(goes_on(stacked, UNROLLED), wanted, 1e-6)  # untraced indices
    laws.close(goes_on(kvjax.unstack(stacked)), wanted, 1e-6)
    laws.close(goes_on(kvjax.stack(alone)), wanted, 1e-6)
    assert kvjax.nbytes(stacked) == kvjax.nbytes(alone)
    for number in (0, LAYERS - 1):
        there, here = (kvjax.read(cache, number) for cache in (stacked, alone))
        assert np.array_equal(there[2], here[2])
        held = np.asarray(here[2])[:, None, :, None] >= 0
        for a, b in zip(there[:2], here[:2], strict=True):
            laws.close(np.where(held, a, 0), np.where(held, b, 0), 1e-6)


def test_the_arrays_are_layers_first():
    (held,) = empty(max_len=32).layers
    assert held.keys.shape == held.values.shape == (LAYERS, ROWS, KV, 32, DIM)
    (held,) = empty("int8").layers
    assert {x.shape[0] for x in jax.tree.leaves(held)} == {LAYERS}


OPERATIONS = {
    "select": lambda c: kvjax.select(c, [2, 0]),
    "repeat": lambda c: kvjax.select(kvjax.repeat(c, 2), [0, 3, 5]),
    "rewind": lambda c: kvjax.rewind(c, np.array([7, 3, 1])),
    "rewind of pages": lambda c: kvjax.rewind(c, np.array([7, 3, 1])),
    "reset": lambda c: kvjax.reset(c, np.array([False, True, False])),
    "fork": kvjax.fork,
    "concatenate": lambda c: kvjax.select(kvjax.concatenate([c, c]), [3, 1, 5]),
    "convert": lambda c: kvjax.convert(c, "static", max_len=48),
    "migrate": lambda c: kvjax.migrate(kvjax.fork(c), kvjax.Host()),
    "grow": lambda c: kvjax.grow(kvjax.convert(c, "dynamic"), 600),
}


@pytest.mark.parametrize("change", some(OPERATIONS))
def test_operations(change):
    """The result is stacked, and equals the result of unstacked layers."""
    paged = "fork", "rewind of pages"
    name = "raw" if change == "grow" else "pages" if change in paged else "int8"
    found = OPERATIONS[change](filled(name))
    wanted = OPERATIONS[change](filled(name, UNROLLED, stacked=False))
    assert found.stacks is not None and found.length.tolist() == wanted.length.tolist()
    laws.close(goes_on(found), goes_on(wanted), 1e-6)


COPIED = [
    ("raw", "while_loop", 1), ("int8", "step", 3), ("pages", "while_loop", 1), ("host", "chunk", 3),
    *(
        pytest.param(*cell, marks=pytest.mark.slow)
        for cell in (
            ("raw", "step", 3), ("raw", "chunk", 1), ("int8", "while_loop", 1),
            ("int8", "chunk", 3), ("pages", "step", 3), ("pages of 8 bits", "chunk", 3),
            ("sinks", "while_loop", 3), ("host", "while_loop", 1),
        )
    ),
]  # fmt: skip


@pytest.mark.slow(but=("raw-while_loop-1",))
@pytest.mark.parametrize(("name", "form", "batch"), COPIED)
def test_nothing_of_a_layer_is_copied(name, form, batch):
    """In a scan over layers, also inside a loop over steps: the stack is aliased, and temporaries
    grow only with the page tables."""
    temporary, tables = [], []
    for max_len in (2**15, 2**17):
        cache = empty(name, batch=batch, max_len=max_len)
        tokens = TEXT[:batch, : 12 if form == "chunk" else 1]

        def program(params, tokens, cache):
            if form != "while_loop":
                return scanned(params, tokens, cache)

            def one(carry):
                return scanned(params, tokens, carry[1])

            x = jnp.zeros((*tokens.shape, HEADS * DIM), jnp.float32)
            return jax.lax.while_loop(lambda c: jnp.all(c[1].length < 90), one, (x, cache))

        found = jax.jit(program, donate_argnums=2).lower(weights(), tokens, cache).compile()
        (held,) = cache.layers
        body = tree_bytes((held.keys, held.values))
        if name != "sinks":  # it has fewer slots than scores
            assert_no_copy(found, sum(kvjax.nbytes(cache).values()), body // LAYERS)
        temporary.append(found.memory_analysis().temp_size_in_bytes)
        tables.append(tree_bytes(cache.pools))
    assert temporary[1] - temporary[0] <= 4 * (tables[1] - tables[0])


@pytest.mark.slow
def test_many_layers_are_one_program():
    """As long as the program for two layers."""
    sizes = []
    for layers in (2, 30):
        args = weights(layers), TEXT[:, :1], empty("int8", layers=layers)
        text = jax.jit(scanned).lower(*args).compile().as_text()
        # Count instructions; source tables depend on what was traced before.
        sizes.append(sum(" = " in line for line in text.splitlines()))
    assert sizes[0] <= sizes[1] <= 1.05 * sizes[0]


WINDOWS = (12, None, 12, None)


@pytest.mark.slow
def test_layers_that_are_not_alike_are_stacks_of_their_own():
    """A model with alternating layers, scanned in pairs."""

    def by_twos(params, tokens, cache):
        def two(carry, xs):
            x, call = carry
            both, number = xs
            for stack in range(2):
                one = jax.tree.map(lambda w, n=stack: w[n], both)
                x, call = layer(x, call, one, (stack, number))
            return (x, call), None

        params = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), params)
        begun = jnp.asarray(EMBEDDED)[tokens], kvjax.step(cache, tokens)
        (x, call), _ = jax.lax.scan(two, begun, (params, jnp.arange(2)))
        return x, call.done()

    found = []
    for model, stacked in ((by_twos, True), (unrolled, True), (unrolled, False)):
        cache = kvjax.init_cache(
            config(windows=WINDOWS), "hybrid", batch=ROWS, max_len=64, stacked=stacked
        )
        for start in (0, 16, 32):
            x, cache = jax.jit(model)(weights(), TEXT[:, start : start + 16], cache)
        kvjax.check(cache)
        found.append((np.asarray(x), cache))
    assert len(found[0][1].layers) == 2 and found[0][1].stacks == ((0, 0), (1, 0), (0, 1), (1, 1))
    laws.close(found[0][0], found[2][0], 1e-6)
    laws.close(found[1][0], found[2][0], 1e-6)
    with pytest.raises(ValueError, match="the cache has 2 stacks"):
        jax.eval_shape(scanned, weights(), TEXT, found[0][1])


@pytest.mark.parametrize("name", some(("raw", "int8")))
def test_on_a_mesh(name):
    over = kvjax.make_mesh(data=2, tensor=2, sequence=2)
    cache, alone = empty(name, batch=4, mesh=over), empty(name, batch=4)
    text = np.concatenate([TEXT, TEXT[:1]])
    for width in (16, 16, 1):
        tokens, text = text[:, :width], text[:, width:]
        x, cache = SCANNED(weights(), tokens, cache)
        wanted, alone = SCANNED(weights(), tokens, alone)
        laws.close(x, wanted, 1e-5)
    kvjax.check(cache)
    (held,) = cache.layers
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(held))
    one = kvjax.migrate(cache, mesh=None)
    tokens = text[:, :1]
    laws.close(SCANNED(weights(), tokens, one)[0], SCANNED(weights(), tokens, alone)[0], 1e-5)


@pytest.mark.slow
def test_gradients_go_through_a_stack():
    def loss(params, model, stacked):
        cache = empty(stacked=stacked)
        x, cache = model(params, TEXT[:, :9], cache)
        return jnp.mean(jnp.sin(model(params, TEXT[:, 9:12], cache)[0])) + jnp.mean(x**2)

    found = jax.grad(loss)(weights(), scanned, True)
    wanted = jax.grad(loss)(weights(), unrolled, False)
    for a, b in zip(found, wanted, strict=True):
        laws.close(a, b, 1e-5)


def test_without_a_cache_a_call_is_the_same():
    """Training and generation run the same function."""
    whole, none = SCANNED(weights(), TEXT)
    assert none is None
    found, _ = SCANNED(weights(), TEXT, empty())
    laws.close(found, whole, 1e-5)


def test_a_call_tells_where_its_tokens_stand():
    assert kvjax.step(None, 3).positions.tolist() == [[0, 1, 2]]
    call = kvjax.step(filled("raw"), TEXT[:, :2])
    assert call.positions.tolist() == [[30, 31], [25, 26], [9, 10]] and call.new == 2


def numbers(new=1, rows=ROWS):
    return jnp.ones((rows, HEADS, new, DIM)), *[jnp.ones((rows, KV, new, DIM))] * 2


def missing_a_layer(cache):
    call = kvjax.step(cache, 1)
    return call.attend(1, *numbers())[1].done()


def over_the_end(cache):
    """A scan that starts at layer 1."""

    def one(call, number):
        return call.attend(number, *numbers())[1], None

    call, _ = jax.lax.scan(one, kvjax.step(cache, 1), 1 + jnp.arange(LAYERS))
    return call.done()


def test_a_layer_that_is_missed_or_met_twice_is_told():
    with pytest.raises(ValueError, match=r"appended to \[\[0, 1, 0, 0\]\] times, not once"):
        missing_a_layer(empty())
    for wrong in (missing_a_layer, over_the_end):
        with pytest.raises(
            ValueError, match=r"some layer of a stack more than once, or never \(row\(s\) 0, 1, 2\)"
        ):
            kvjax.check(jax.jit(wrong)(empty()))


def one_after_the_other(cache, new=BLOCK + 1):
    """With ``append`` and ``attend``: attending to each layer after its own tokens."""
    queries, keys, values = numbers(new)
    for number in range(LAYERS):
        cache = kvjax.append(cache, number, keys, values)
        mixed = kvjax.attend(queries, cache, number)
    return mixed, cache


@pytest.mark.slow
def test_what_a_long_call_sees_raw_is_of_the_last_layer():
    """Other layers raise an error; if traced, they give NaN."""
    mixed, cache = one_after_the_other(empty("int8"))
    assert np.all(np.isfinite(mixed)) and np.all(np.isfinite(kvjax.read(cache, LAYERS - 1)[0]))
    for wrong in (lambda c: kvjax.attend(numbers(BLOCK + 1)[0], c, 0), lambda c: kvjax.read(c, 0)):
        with pytest.raises(ValueError, match="only for the layer that was appended to last"):
            wrong(cache)

    def early(cache):
        _, cache = one_after_the_other(cache)
        return kvjax.attend(numbers(BLOCK + 1)[0], cache, 0), kvjax.read(cache, 0)[0]

    assert all(np.all(np.isnan(x)) for x in jax.jit(early)(empty("int8")))
    call = kvjax.step(empty("int8"), BLOCK + 1)
    queries, keys, values = numbers(BLOCK + 1)
    _, call = call.attend(0, queries, keys, values)
    with pytest.raises(ValueError, match="only for the layer that was appended to last"):
        call.attend(0, queries)
    kvjax.attend(queries[:, :, :2], one_after_the_other(empty("int8"), 2)[1], 0)  # short enough


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda: kvjax.step(kvjax.step(empty(), 1).cache, 1),
            r"a call has begun.*advance\(cache, 1",
        ),
        (lambda: kvjax.step(empty(), TEXT[:2]), r"tokens have 2 row\(s\), but the cache has 3"),
        (
            lambda: kvjax.step(empty(), TEXT[0]),
            r"must have the shape \[batch, new",
        ),
        (lambda: kvjax.step(empty(), 0), "tokens must be an integer >= 1, got 0"),
        (lambda: kvjax.step(empty(), 2, lengths=np.array([1, 2, 3])), r"lengths\[2\] is 3"),
        (lambda: kvjax.step(empty(), 2).attend(0, *numbers(3)), "3 token.*the call began with 2"),
        (lambda: kvjax.step(None, 2).attend(0, *numbers(3)), "3 token.*the call began with 2"),
        (
            lambda: kvjax.step(None, 2).attend(0, numbers(2)[0]),
            "without a cache, pass the earlier",
        ),
        (
            lambda: kvjax.step(empty(), 1).attend(0, *numbers()[:2]),
            "both keys and values, or",
        ),
        (lambda: kvjax.step(empty(), 1).attend(4, *numbers()), "layer 4: the cache has 4"),
        (lambda: kvjax.step(empty(), 1).attend((1, 0), *numbers()), "stack 1: the cache has 1"),
        (lambda: kvjax.step(empty(), 1).attend((0, 9), *numbers()), "layer 9 of stack 0: it has 4"),
        (lambda: kvjax.step(empty(), 1).attend((0,), *numbers()), r"must be \(stack, number\)"),
        (
            lambda: jax.eval_shape(scanned, weights(), TEXT, empty(stacked=False)),
            "for lax.scan: init_cache.*stacked=True",
        ),
        (
            lambda: kvjax.step(empty(stacked=False), 1).attend((0, 0), *numbers()),
            r"layer \(0, 0\): the cache has no stacks",
        ),
        (lambda: empty(kvjax.policy("auto", memory="1MiB")), "moves them one by one"),
        (lambda: empty(stacked=1), "stacked must be True or False, got 1"),
    ],
)
def test_wrong_calls_end_in_a_sentence(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


def test_layers_that_read_another_s_are_not_stacked():
    class Shared:
        num_hidden_layers, num_key_value_heads, head_dim, dtype = 2, KV, DIM, "float32"
        cache_sources = (0, 0)

    with pytest.raises(ValueError, match="read the keys of an earlier one can't be stacked"):
        kvjax.init_cache(Shared(), max_len=8, stacked=True)


def test_layers_whose_marks_differ_are_not_stacked():
    """Identical layers, one of them rewound separately."""
    cache = filled("raw", UNROLLED, stacked=False)
    apart = replace(cache, written=cache.written.at[1, 2].add(1))
    with pytest.raises(ValueError, match=r"layers \[0, 1, 2, 3\] hold different tokens of row 1"):
        kvjax.stack(apart)
    with pytest.raises(ValueError, match=r"row\(s\) 1 had forgotten tokens"):
        kvjax.check(jax.jit(kvjax.stack)(apart))


@pytest.mark.slow
def test_a_stack_is_saved_layer_by_layer(tmp_path):
    cache = filled("int8")
    kvjax.save_cache(tmp_path / "cache", cache)
    found, _ = kvjax.load_cache(tmp_path / "cache")
    assert found.stacks is None
    laws.close(goes_on(kvjax.stack(found)), goes_on(cache), 1e-6)


@pytest.mark.slow
def test_the_page_of_one_s_own_model_runs(capsys):
    page = (ROOT / "docs/your-model.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
    found = {}
    exec(compile(code, "your-model.md", "exec"), found)
    laws.close(found["scan_logits"], found["loop_logits"], 2e-2)  # 8 bits against full precision
    assert found["cache"].length.tolist() == [32, 27] and len(found["stacked"].layers) == 1
    stacks, tokens = capsys.readouterr().out.splitlines()
    assert stacks == "((0, 0), (1, 0), (0, 1), (1, 1))"
    assert [len(row) for row in ast.literal_eval(tokens)] == [8, 8]


def test_pages_of_stacks_are_told():
    found, wanted = (
        kvjax.memory.page_map(x) for x in (filled("pages"), kvjax.unstack(filled("pages")))
    )
    assert str(found) == str(wanted)
