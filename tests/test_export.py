"""Programs that are kept: a step with any cache, written down and read back."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import export

import kvjax
from kvjax.core.pytree import deserialize_static, serialize_static
from kvjax.layouts import Ring
from tests import laws
from tests.matrix import CODECS, LAYOUTS, RAW, policy_case, tiny_model

NEW = np.array([16, 9, 3], np.int32)
MODEL, PARAMS = tiny_model()


def kept(function, *args):
    """A program, written down and read back."""
    return export.deserialize(export.export(function)(*args).serialize())


def cell(codec, layout, place="device"):
    cache = laws.empty(policy_case((codec, codec), layout, place), 64)
    return cache, *(np.asarray(x[:, :, :16]) for x in laws.texts()), NEW


@pytest.mark.slow(
    but=(
        "float16-dense-device",
        "bfloat16-dense-device",
        "float32-dense-device",
        "float8-dense-device",
        "float8-wide-dense-device",
    )
)
@pytest.mark.parametrize(
    ("codec", "layout", "place"),
    [
        *((codec, "dense", "device") for codec in (*CODECS, *RAW)),
        *(("float32", layout, "host") for layout in LAYOUTS),
    ],
)
def test_a_program_is_kept_for_every_policy(codec, layout, place):
    """With the cache that it takes and gives, to the last setting."""
    args = cell(codec, layout, place)
    found, wanted = kept(laws.call, *args), jax.eval_shape(laws.call, *args)
    assert found.in_tree == jax.tree.structure((args, {}))
    assert found.out_tree == jax.tree.structure(wanted)


@pytest.mark.slow(but=("float32-sinks",))
@pytest.mark.parametrize(("codec", "layout"), [("float32", "sinks"), ("centered", "ring")])
def test_what_a_kept_program_computes(codec, layout):
    args = cell(codec, layout)
    (found, cache), (wanted, other) = kept(laws.call, *args).call(*args), laws.call(*args)
    assert np.array_equal(found, wanted)
    laws.same_arrays(cache, other)
    kvjax.check(kvjax.rewind(cache, 1))


@pytest.mark.slow
def test_a_chunk_serves_prompts_of_any_length():
    """As docs/caches.md says: one program with ``lengths``, called as often as it takes."""
    step = jax.jit(functools.partial(MODEL.apply, last_only=True))
    cache = kvjax.init_cache(MODEL.config, kvjax.policy(bits=8), batch=2, max_len=128)
    chunk, lengths = np.zeros((2, 16), np.int32), np.full(2, 16, np.int32)
    kept_step = export.export(step)(PARAMS, chunk, cache, lengths=lengths)
    kept_step = export.deserialize(kept_step.serialize())
    text = np.random.default_rng(0).integers(0, MODEL.config.vocab_size, (2, 40)).astype(np.int32)
    wanted = jax.jit(MODEL.apply)(PARAMS, text)
    for size in (5, 23, 40):
        fed = cache
        for start in range(0, size, 16):
            part = text[:, start : min(start + 16, size)]
            padded = np.pad(part, ((0, 0), (0, 16 - part.shape[1])))
            found, fed = kept_step.call(
                PARAMS, padded, fed, lengths=np.full(2, part.shape[1], np.int32)
            )
        assert fed.length.tolist() == [size] * 2
        # Nothing has left the tail yet.
        assert np.abs(found[:, 0] - wanted[:, size - 1]).max() <= 1e-5 * np.abs(wanted).max()


def test_open_sizes_are_refused():
    (new,) = export.symbolic_shape("new")
    cache = kvjax.init_cache(MODEL.config, batch=2, max_len=64)
    tokens = jax.ShapeDtypeStruct((2, new), np.int32)
    with pytest.raises(
        ValueError, match=r"tokens are \['2', 'new'\].* export it for one chunk size"
    ):
        export.export(jax.jit(MODEL.apply))(PARAMS, tokens, cache)
    numbers = jax.ShapeDtypeStruct((2, 2, new, 8), np.float32)
    append = jax.jit(lambda cache, x: kvjax.append(cache, 0, x, x))
    with pytest.raises(ValueError, match=r"keys are .*'new'.* export it for one chunk size"):
        export.export(append)(cache, numbers)
    queries = jax.ShapeDtypeStruct((2, 4, new, 8), np.float32)
    with pytest.raises(ValueError, match=r"queries are .*'new'.* export it for one chunk size"):
        export.export(jax.jit(lambda c, q: kvjax.attend(q, c, 0, causal=False)))(cache, queries)
    rows = dataclasses.replace(cache, length=jax.ShapeDtypeStruct((new,), np.int32))
    with pytest.raises(ValueError, match=r"rows of a cache are \['new'\]"):
        export.export(jax.jit(lambda c: kvjax.rewind(c, 1)))(rows)


def test_what_can_not_be_written_down():
    cache = kvjax.init_cache(MODEL.config, batch=8, max_len=64, mesh=kvjax.make_mesh(data=8))
    program = export.export(jax.jit(lambda c: c.length))(cache)
    with pytest.raises(ValueError, match=r"a Mesh can't be exported.* must not be on a mesh"):
        program.serialize()
    written = serialize_static((Ring(4),))
    assert deserialize_static(written) == (Ring(4),)
    with pytest.raises(ValueError, match=r"exported with Rong of kvjax\.layouts\.ring: import"):
        deserialize_static(written.replace(b'"Ring"', b'"Rong"'))
    with pytest.raises(ValueError, match=r"in the version that exported the program"):
        deserialize_static(written.replace(b'"slack"', b'"slick"'))
