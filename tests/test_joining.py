"""A new layout and a new codec join the matrix of laws with one line each."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.codecs import Codec
from kvjax.layouts import Layout, Run
from tests import matrix, test_copies, test_mesh, test_recompute
from tests.covering import covering, pairs_of


@dataclasses.dataclass(frozen=True)
class Halves(Layout):
    """The second half of a row is stored before the first: slot ``(p + half) % slots``."""

    max_len: int | None = None

    slots = property(lambda self: self.max_len)
    half = property(lambda self: self.max_len // 2)

    def resolve(self, max_len, window, initial_len=None, min_rewind=16):
        return Halves(max_len if self.max_len is None else self.max_len)

    def rounded(self, parts):
        return Halves(self.slots + -self.slots % parts)

    def in_blocks(self, block, recent):
        return Halves(max((self.slots - 1) // block - recent, 1))

    def runs(self, length, new):
        first = Run(length + self.half, self.half, self.max_len)
        return [first, Run(length + self.half - self.max_len, 0, self.half)]

    def positions(self, length, written, slots):
        held = (slots - self.half) % self.max_len
        return jnp.where(held < length[:, None], held, -1)

    def slot_of(self, positions):
        return (positions + self.half) % self.max_len


@dataclasses.dataclass(frozen=True)
class Sixteenths(Codec):
    """Multiples of one sixteenth, up to eight."""

    dtype: str | None = None
    blockwise: ClassVar[bool] = True

    def resolve(self, model_dtype, platform):
        return dataclasses.replace(self, dtype=self.dtype or model_dtype)

    def empty(self, shape):
        return jnp.zeros(shape, jnp.int8)

    def encode(self, x):
        x = jnp.nan_to_num(x.astype(jnp.float32), posinf=8.0, neginf=-8.0)
        return jnp.round(16 * x.clip(-7.9, 7.9)).astype(jnp.int8)

    def decode(self, store):
        return (store / 16).astype(self.dtype)


@pytest.fixture
def joined(monkeypatch):
    """The matrix with both lines."""
    monkeypatch.setitem(matrix.LAYOUTS, "halves", (Halves(), (None, 0)))
    monkeypatch.setitem(matrix.CODECS, "sixteenths", Sixteenths())


@dataclasses.dataclass(frozen=True)
class Unrelated:
    """A codec that does not inherit from ``Codec``."""

    dtype: str | None = None
    blockwise, before_rotary, joins_heads = True, False, False

    resolve, empty = Sixteenths.resolve, Sixteenths.empty
    encode, decode = Sixteenths.encode, Sixteenths.decode
    nbytes, scores, weighted_values = Codec.nbytes, Codec.scores, Codec.weighted_values


class Computed(Unrelated):
    """A codec whose static members are properties."""

    blockwise = property(lambda self: True)
    before_rotary = joins_heads = property(lambda self: False)


@dataclasses.dataclass(frozen=True)
class Required(Codec):
    """A codec whose fields have no defaults."""

    dtype: str | None
    blockwise: bool
    joins_heads: bool = dataclasses.field(kw_only=True)

    resolve, empty = Sixteenths.resolve, Sixteenths.empty
    encode, decode = Sixteenths.encode, Sixteenths.decode


class Assigned(Sixteenths):
    """A codec that sets its members in ``__init__``."""

    def __init__(self, dtype=None):
        for name, value in {"dtype": dtype, "blockwise": True, "joins_heads": False}.items():
            object.__setattr__(self, name, value)


FORMS: tuple[Codec, ...] = (
    Sixteenths(), Computed(), Unrelated(), Required(None, True, joins_heads=False), Assigned()
)  # fmt: skip
"""Each of them is a ``Codec`` for type checkers."""


@pytest.mark.parametrize("codec", FORMS, ids=lambda codec: type(codec).__name__)
def test_forms_of_codecs(codec):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 11, 4)), jnp.float32)
    keys, values = kvjax.codecs.quantize_kv(x, x, codec, block=16)
    assert keys.nbytes == codec.nbytes((1, 2, 1, 16, 4)) == 128
    assert type(keys.codec) is type(codec)
    for found in kvjax.codecs.dequantize_kv(keys, values):
        assert float(abs(found - x).max()) <= 1 / 32


TEAM = ("sixteenths", "int8")


def test_they_join_the_covering_sets_and_do_not_multiply_them(joined):
    every = matrix.cache_cells()
    kinds = matrix.CACHE_PAIRS + matrix.OPERATION_PAIRS
    chosen = matrix.choice(matrix.choice(every, kinds), matrix.CACHE_PAIRS)
    assert {c.layout for c in chosen if "sixteenths" in c.codecs} == {*matrix.LAYOUTS}
    codecs = {name for cell in chosen if cell.layout == "halves" for name in cell.codecs}
    assert codecs == {*matrix.CODECS, *matrix.RAW}
    matrix_alone = {"halves", "sixteenths"}
    old = [c for c in every if c.layout != "halves" and not matrix_alone & {*c.codecs}]
    for kinds in (matrix.CACHE_PAIRS, matrix.OPERATION_PAIRS):
        now, before = (
            covering(some, functools.partial(pairs_of, kinds=kinds)) for some in (every, old)
        )
        assert len(now) <= len(before) + len(matrix.CODECS) + len(matrix.RAW)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["device", "host"])
def test_the_laws_of_caches_hold(joined, place):
    operations = tuple(name for name in matrix.OPERATIONS if name != "grow")
    cell = matrix.CacheCell(TEAM, "halves", place, operations, place == "device", 64)

    @settings(max_examples=3)
    @given(data=st.data())
    def chunks(data):
        test_recompute.check_chunks(cell, data)

    chunks()
    test_recompute.check_operations(cell)
    if place == "host":
        test_recompute.check_place(cell)


@pytest.mark.slow
def test_the_law_of_meshes_holds(joined):
    test_mesh.check(matrix.MeshCell(TEAM, "halves", "2-2-2", "grouped", "device"))


def test_the_copy_law_holds(joined):
    test_copies.check(matrix.CopyCell(TEAM, "halves", "while_loop"))


@pytest.mark.slow
def test_a_wrong_layout_does_not_pass(joined, monkeypatch):
    """The law detects a slot at a wrong position."""
    monkeypatch.setattr(
        Halves, "positions", lambda self, length, written, slots: jnp.where(
            slots < length[:, None], slots, -1)
    )  # fmt: skip
    cell = matrix.CacheCell(("float32",), "halves", "device", ("fork",), False, 48)
    jax.clear_caches()  # a layer's trace is kept, and knows the right one
    with pytest.raises(AssertionError):
        test_recompute.filled(*cell.made_by)
    jax.clear_caches()
