"""Every public function that takes a cache, on caches of every kind, in and out of ``jit``.

It gives what it gives of a plain cache, or says in a sentence what is wrong.
"""

import functools
import inspect
import pickle
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.layouts import Dense, Growing
from tests.matrix import CODECS, tiny_config

CONFIG = tiny_config(num_hidden_layers=2, windows=(None, None))
HELD, NEW, MAX_LEN = 9, 2, 24
KEYS, VALUES = np.random.default_rng(0).normal(size=(2, 2, 2, HELD + NEW, 8)).astype(np.float32)
QUERIES = np.random.default_rng(1).normal(size=(2, 4, NEW, 8)).astype(np.float32)
CODEC = CODECS["int8"]


def part(x: Any, cache: Any, start: int, stop: int) -> Any:
    """Numbers for the rows of a cache."""
    rows = cache.batch if isinstance(cache, kvjax.KVCache) else 2
    return np.resize(x, (rows, *x.shape[1:]))[:, :, start:stop]


def appended(cache: Any, start: int = HELD, stop: int = HELD + NEW, layers: int = 2) -> Any:
    for layer in range(layers):
        numbers = (part(x, cache, start, stop) for x in (KEYS, VALUES))
        cache = kvjax.append(cache, layer, *numbers)
    return cache


@functools.partial(jax.jit, static_argnums=(1, 2))
def fed(cache: Any, start: int, stop: int) -> Any:
    return kvjax.advance(appended(cache, start, stop), stop - start)


def filled(policy: Any = "static", batch: int = 2, **more: Any) -> Any:
    return fed(kvjax.init_cache(CONFIG, policy, batch=batch, max_len=MAX_LEN, **more), 0, HELD)


def elsewhere() -> Any:
    with jax.default_device(jax.devices()[1]):
        return filled()


def used_up() -> Any:
    cache = filled()
    jax.jit(lambda c: jax.tree.map(lambda x: x + 1, c), donate_argnums=0)(cache)
    for leaf in jax.tree.leaves(cache):
        leaf.delete()
    return cache


CACHES = {
    "static": filled,
    "growing": lambda: filled(kvjax.CachePolicy(Growing(start=16))),
    "ring": lambda: filled(kvjax.policy("sliding_window", window=12, sinks=2)),
    "quantized": lambda: filled(kvjax.CachePolicy(Dense(), CODEC, CODEC, block=8, recent=0)),
    "host": lambda: filled(kvjax.CachePolicy(placement=kvjax.Host(), block=8)),
    "paged": lambda: filled(kvjax.policy("paged", page_size=16)),
    "bfloat16": lambda: filled(kvjax.policy(dtype="bfloat16")),
    "one row": lambda: filled(batch=1),
    "mesh": lambda: filled(mesh=kvjax.make_mesh(data=2, tensor=2)),
    "elsewhere": elsewhere,
    "numpy": lambda: jax.device_get(filled()),
    "pickled": lambda: pickle.loads(pickle.dumps(filled())),
    "in a call": lambda: appended(filled()),
    "stacked": lambda: jax.tree.map(lambda x: jnp.stack([x, x]), filled()),
    "cut": lambda: replace(filled(), layers=filled().layers[:1]),
    "cast": lambda: jax.tree.map(
        lambda x: x.astype("bfloat16") if x.dtype == "float32" else x, filled()
    ),
    "used up": used_up,
    "shapes": lambda: jax.eval_shape(filled),
    "none": lambda: None,
    "layer": lambda: filled().layers[0],
}
"""What users give: caches of other policies, dtypes, rows and places, and what is none."""

ONE_CALL = "in a call"
"""Between ``append`` and ``advance``."""

FUNCTIONS: dict[str, Any] = {
    "append": lambda c: kvjax.append(c, 0, part(KEYS, c, 0, NEW), part(VALUES, c, 0, NEW)),
    "advance": lambda c: kvjax.advance(c, NEW),
    "attend": lambda c: kvjax.attend(part(QUERIES, c, 0, NEW), c, 0),
    "attend causal=False": lambda c: kvjax.attend(part(QUERIES, c, 0, NEW), c, 0, causal=False),
    "check": kvjax.check,
    "clear_status": kvjax.clear_status,
    "concatenate": lambda c: kvjax.concatenate([c, c]),
    "concatenate with static": lambda c: kvjax.concatenate([filled(), c]),
    "convert": lambda c: kvjax.convert(c, "static"),
    "fork": kvjax.fork,
    "grow": lambda c: kvjax.grow(c, 2 * MAX_LEN),
    "make_room": lambda c: kvjax.make_room(c, 2 * MAX_LEN)[0],
    "memory_report": lambda c: len(kvjax.memory.memory_report(c)),
    "migrate": lambda c: kvjax.migrate(c, kvjax.Device()),
    "nbytes": kvjax.nbytes,
    "read": lambda c: kvjax.read(c, 1),
    "repeat": lambda c: kvjax.repeat(c, 2),
    "reset": kvjax.reset,
    "rewind": lambda c: kvjax.rewind(c, 1),
    "rewindable": kvjax.rewindable,
    "select": lambda c: kvjax.select(c, [0, 0]),
}
"""Each as a user calls it. Those that can't run inside ``jit`` are ``OUTSIDE``."""

OUTSIDE = {"check", "grow", "make_room", "migrate"}
ELSEWHERE = {
    "stack": "tests/test_stacks.py", "unstack": "the same", "step": "the same",
    "compile": "takes a policy", "generate": "tests/test_generate.py", "stream": "the same",
    "generate_batches": "tests/test_batches.py", "self_attend": "without a cache",
    "init_cache": "makes one", "page_map": "tests/test_pages.py",
    "save_cache": "tests/test_saving.py", "prefill": "tests/test_scores.py",
    "score": "the same", "rollout": "tests/test_rollouts.py",
}  # fmt: skip
"""Functions of the cache's business that are not called here, and why."""


def test_no_function_is_missing():
    named = {name.split()[0] for name in FUNCTIONS}
    for name in kvjax.__all__:
        function = getattr(kvjax, name)
        if inspect.isfunction(function) and name not in ELSEWHERE:
            takes = {"cache", "caches"} & set(inspect.signature(function).parameters)
            assert (name in named) == bool(takes), name


def shown(found: Any) -> Any:
    """A result as numbers: of a cache, what each row holds, by position."""
    if isinstance(found, kvjax.KVCache):
        rows = []
        read = [jax.jit(kvjax.read, static_argnums=1)(found, n) for n in range(len(found.layers))]
        for row in range(found.batch):
            tokens = {}
            for layer, (keys, values, at) in enumerate(jax.device_get(read)):
                for slot in np.flatnonzero(at[row] >= 0):
                    key = layer, int(at[row, slot])
                    tokens[key] = (
                        keys[row, :, slot].astype(float),
                        values[row, :, slot].astype(float),
                    )
            rows.append(tokens)
        return rows
    return jax.tree.map(lambda x: np.asarray(x, float), jax.device_get(found))


def sentence(error: Exception) -> bool:
    """Whether an error is one of ours, for a user to read."""
    words = str(error)
    return isinstance(error, ValueError | kvjax.KvjaxError) and "\n" not in words and " " in words


def outcome(function: Any, cache: Any) -> Any:
    try:
        return shown(function(cache))
    except Exception as error:
        assert sentence(error), f"{type(error).__name__}: {error}"
        return str(error)


@functools.cache
def plain(name: str, batch: int, call: bool) -> Any:
    """What a function gives of a static cache in float32."""
    cache = filled(batch=batch)
    return outcome(FUNCTIONS[name], appended(cache) if call else cache)


def same(found: Any, wanted: Any, tolerance: float) -> bool:
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], dict):
        return len(found) == len(wanted) and all(
            set(a) <= set(b) and all(np.allclose(a[k], b[k], atol=tolerance) for k in a)
            for a, b in zip(found, wanted, strict=True)
        )
    return True  # slots and bytes differ with the policy


RARE = "bfloat16", "paged", "mesh", "host", "one row", "elsewhere", "pickled"


@pytest.mark.slow(but=("layer", "numpy", "cast", "stacked", "cut", "used up"))
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.rare] * (kind in RARE)) for kind in CACHES]
)
def test_every_function_on_caches_of_every_kind(kind):
    """A result has the content that it has of a plain cache; what is refused is refused in a
    sentence, outside ``jit`` and inside; and nothing that works outside is refused inside but what
    must look at the numbers."""
    tolerance = {"bfloat16": 0.05, "quantized": 0.05}.get(kind, 1e-6)
    for name, function in FUNCTIONS.items():
        cache = CACHES[kind]()
        batch = 1 if kind == "one row" else 2
        found = outcome(function, cache)
        if not isinstance(found, str):
            wanted = plain(name, batch, kind == ONE_CALL)
            assert isinstance(wanted, str) is False, (name, wanted)
            assert same(found, wanted, tolerance), name
        if kind in ("used up", "shapes", "none", "layer"):
            by_shape = name in ("nbytes", "memory_report")
            known = by_shape and kind in ("used up", "shapes")
            assert isinstance(found, str) != known, name
            continue
        inside = outcome(jax.jit(function), CACHES[kind]())
        if name in OUTSIDE:
            assert isinstance(inside, str), name
        elif isinstance(found, str) or kind == "numpy":
            continue
        else:
            assert isinstance(inside, str) is False, (name, inside)
            assert same(inside, found, 1e-6), name
