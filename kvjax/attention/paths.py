"""Attention paths (implementations that compute the same output), and which path is the default.

The path ``pallas`` uses the first of the target device's kernels that can read the layer. Kernels
are imported when they are first used, because importing Pallas takes up to a second.

Two paths are for batches whose rows have very different lengths, as in an engine. The path ``even``
groups rows of similar lengths, so that few rows are processed up to the length of the longest. The
path ``pages`` multiplies queries with the pages of a pool in place, similar to paged attention
(Kwon et al., arXiv:2309.06180).
"""

import functools
import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import jax.numpy as jnp
from jax import lax

from kvjax.attention.blocks import (
    MAX_QUERIES,
    MIN_FILLED,
    SCORE_ARRAYS,
    blockwise,
    bucketed,
    has_product_dtype,
    prefix,
    reference,
)
from kvjax.attention.kernels.common import KernelInputs, refuse
from kvjax.attention.softmax import LOWEST, AttentionInputs, Partial, Unsupported
from kvjax.cache.sections import Section
from kvjax.core import compat, control_flow
from kvjax.core.array_ops import arange_row
from kvjax.core.mesh_context import has_auto_axes
from kvjax.core.target import Target, current_target, on_cpu
from kvjax.core.typing import Array, AttentionOutput, PerRow
from kvjax.policies.cache_policy import CachePolicy


def kernels_for(target: Target) -> tuple[str, ...]:
    """Return the names of the kernel modules that a target can run with the installed JAX, in the
    order in which they are tried. A CPU interprets a kernel if the path ``pallas`` is requested by
    name."""
    if target.platform == "tpu":
        return ("mosaic_tpu",)
    available = []
    if compat.has_mosaic_gpu():
        available.append("mosaic_gpu")
    if compat.has_triton():
        available.append("triton")
    if target.platform == "cpu":
        return tuple(available[-1:])
    if target.capability is None:  # not an NVIDIA GPU
        return tuple(name for name in available if name == "triton")
    return () if target.before_ampere else tuple(available)


def gained_by_upgrading(target: Target) -> str | None:
    """Return a sentence that says what a newer JAX would improve on a target; None if nothing."""
    if target.platform == "tpu" and compat.JAX < (0, 8):
        return "JAX 0.8: the kernel reads the cache in HBM; before, a compiler may copy it first"
    if target.capability is None or target.before_ampere or compat.JAX >= (0, 12):
        return None
    python = " (needs Python 3.12)" if sys.version_info < (3, 12) else ""
    return f"JAX 0.12{python}: attention by the Mosaic GPU kernel, not by the Pallas Triton kernel"


def pallas(inputs: AttentionInputs) -> AttentionOutput:
    """Compute attention over each section of a layer with a flash-decoding kernel. If the kernel
    can't read one of the smaller sections, that section is processed without the kernel.

    Raises:
      Unsupported: if the target has no kernel, scores have a bias, or no kernel can read the
        layer's storage format.
    """
    target = current_target()
    names = kernels_for(target)
    if not names:
        raise Unsupported(f"the attention path 'pallas' has no kernel for {target}")
    for name in names[:-1]:
        try:
            return _attend_by(_module(name), inputs)
        except Unsupported:
            continue
    return _attend_by(_module(names[-1]), inputs)


def _attend_by(kernel: ModuleType, inputs: AttentionInputs) -> AttentionOutput:
    """Compute attention with one kernel."""
    largest = max(inputs.sections, key=lambda section: section.size * section.unit)
    refuse("pallas", _refusals(kernel, inputs, largest.as_pages()))

    def over(section: Section, before: Partial | None = None) -> Partial:
        pages = section.as_pages()
        if section is largest or not any(_refusals(kernel, inputs, pages).values()):
            partial: Partial = kernel.decode(KernelInputs.of(inputs, pages), before)
            return partial
        return prefix(section, section.size, inputs.rows(section), inputs.mask, before)

    partial = over(inputs.sections[0])
    for section in inputs.sections[1:]:
        partial = over(section, partial)
    return inputs.finish(partial)


def _refusals(kernel: ModuleType, inputs: AttentionInputs, section: Section) -> dict[str, object]:
    """Return the possible reasons why a kernel can't read a section, and whether each applies."""
    if section.placement.needs_tail:
        return {"can't read host memory": True}
    return {
        "does not support a bias": inputs.mask.bias is not None,
        f"needs blocks of a power of two, not {section.unit} tokens": section.unit
        & section.unit - 1,
        "can't read unrotated keys": section.rotary is not None,
        **kernel.refusals(section, inputs.rows(section)),
    }


def _module(name: str) -> ModuleType:
    """Import a kernel's module."""
    return importlib.import_module(f"kvjax.attention.kernels.{name}")


GROUP_ROWS = 4
"""The number of rows in a group."""


def evenly(inputs: AttentionInputs) -> AttentionOutput:
    """Compute attention in blocks of one size. CPUs process the rows in groups of a few, the
    shortest rows first.

    To group rows, their data must be copied. If their layer is in pages, only page tables are
    copied, which is cheap, so only the rows of such layers are grouped. The rows of stacks are not
    grouped. The rows of calls with a bias are not grouped either, because a bias may depend on the
    row.
    """
    batch, view = len(inputs.length), inputs.view
    paged = view.layer_cache.policy.page_group is not None and view.layer is None
    if batch <= GROUP_ROWS or not on_cpu() or not paged or inputs.mask.bias:
        return blockwise(inputs, even=True)

    def attend_rows(rows: Array) -> AttentionOutput:
        return blockwise(inputs.take_rows(rows), even=True)

    order = jnp.argsort(inputs.length)
    # The longest row is repeated to fill the last group.
    order = jnp.pad(order, (0, -batch % GROUP_ROWS), mode="edge")
    output = lax.map(attend_rows, order.reshape(-1, GROUP_ROWS))
    output = output.reshape(-1, *inputs.queries.shape[1:])
    return jnp.zeros_like(inputs.queries).at[order].set(output)


def over_pages(inputs: AttentionInputs) -> AttentionOutput:
    """Compute attention over all pages of a pool in place if that is faster. Otherwise call
    ``evenly``.

    To multiply row by row, a CPU must first copy the pages of each row into one array. The copy
    takes as long as the rest of the computation. If most pages of the pool are in use, and none is
    shared, it is faster to multiply each page with the queries of the row that owns it, without
    copies.
    """
    if not _is_supported(inputs):
        return evenly(inputs)
    (section,) = inputs.sections
    count, table = len(section.keys), section.pages
    assert table is not None
    batch, columns = table.shape
    slots = jnp.arange(columns * section.page, dtype=jnp.int32)
    positions = section.positions(slots, 0).reshape(batch, columns, section.page)
    # Columns of the table whose pages hold tokens, and the indices of those pages in the pool.
    used = jnp.any(positions >= 0, axis=2) & (table >= 0)
    at = jnp.where(used, table, count)
    times = jnp.zeros(count, jnp.int32).at[at].add(1, mode="drop")
    mostly_used = jnp.sum(used, dtype=jnp.int32) >= math.ceil(MIN_FILLED * count)
    pays = mostly_used & (jnp.max(times) <= 1)

    def attend_pages() -> tuple[AttentionOutput, Array]:
        owner = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], at.shape)
        owner = jnp.zeros(count, jnp.int32).at[at].set(owner, mode="drop")
        tokens = jnp.full((count, section.page), -1, jnp.int32).at[at].set(positions, mode="drop")
        partial = _multiply_pages(inputs, section, owner, tokens, at)
        # Empty slots may hold NaN, and 0 * NaN is NaN.
        return inputs.finish(partial), jnp.all(jnp.isfinite(partial.weighted))

    def skip() -> tuple[AttentionOutput, Array]:
        return jnp.zeros_like(inputs.queries), jnp.bool_(False)

    output, done = control_flow.cond(pays, attend_pages, skip)
    result: AttentionOutput = control_flow.cond(done, lambda: output, lambda: evenly(inputs))
    return result


def _multiply_pages(
    inputs: AttentionInputs, section: Section, owner: PerRow, tokens: Array, at: Array
) -> Partial:
    """Compute the softmax of every row over its pages.

    Args:
      inputs: the queries.
      section: the section of pages.
      owner: int32[pages], the row that owns each page.
      tokens: int32[pages, page], the position in each slot of each page.
      at: int32[batch, columns], the pages of each row. In unused columns it is the number of pages.
    """
    mask, queries = inputs.mask.take_rows(owner), inputs.rows(section)[owner]
    products = section.scores(queries, section.keys, tokens, long=True)
    scores, seen = mask.scores(products, tokens, section)
    scores = jnp.where(seen, scores, LOWEST)
    highest = scores.max(-1).at[at].get(mode="fill", fill_value=LOWEST).max(1)
    # ``highest`` is above LOWEST, so the weights of keys that are not seen are exactly 0.
    highest = jnp.maximum(highest, LOWEST / 2)
    weights = jnp.exp(scores - highest[owner][..., None])
    total = weights.sum(-1).at[at].get(mode="fill", fill_value=0).sum(1)
    weighted = section.weighted_values(weights, section.values, None, queries.dtype.name)

    def add_column(number: Array, sums: Array) -> Array:
        return sums + weighted.at[at[:, number]].get(mode="fill", fill_value=0)

    last = jnp.max(jnp.where(at < len(owner), arange_row(at.shape[1]) + 1, 0))
    sums = jnp.zeros((len(at), *weighted.shape[1:]), weighted.dtype)
    return Partial(highest, total, control_flow.fori_loop(0, last, add_column, sums))


def _is_supported(inputs: AttentionInputs) -> bool:
    """Return whether pages can be multiplied in place: they hold raw numbers, and there are few
    enough queries that the intermediate arrays of a page are much smaller than its keys."""
    if not on_cpu() or inputs.shard is not None or inputs.mask.bias or len(inputs.sections) > 1:
        return False
    (section,), new = inputs.sections, inputs.queries.shape[2]
    rows = inputs.rows(section)
    # In a stack most pages belong to other layers.
    own_pages = section.pages is not None and section.layer is None
    near = own_pages and not section.placement.needs_tail
    # The scores, and the queries and outputs, compared with the keys of a page.
    group, head_dim = rows.shape[2:]
    few = SCORE_ARRAYS * group <= head_dim // 2 and SCORE_ARRAYS * group <= section.page
    return near and new == 1 and few and section.unit == 1 and has_product_dtype(section, rows)


Path = Callable[[AttentionInputs], AttentionOutput]
"""A function that computes the attention output. It raises ``Unsupported`` during tracing if it
does not support the inputs."""

PATHS: dict[str, Path] = {
    "blocks": blockwise,
    "reference": reference,
    "buckets": bucketed,
    "pallas": pallas,
    "even": evenly,
    "pages": over_pages,
}

DIFFERENTIABLE = blockwise, reference, bucketed
"""Paths with derivatives. The other paths have the derivative of ``blocks``."""

BRANCHES, KERNELS = "cheap branches", "kernels"
"""Features that a target may have: conditionals that cost little, and kernels."""

TABLE = (
    # a feature of the target, whether a tail is needed, the maximum queries per row; None is any
    (BRANCHES, None, None, "blocks"),
    (None, True, None, "blocks"),  # fetches no more than what is filled
    (KERNELS, None, None, "pallas"),
    (None, None, MAX_QUERIES, "buckets"),
    (None, None, None, "blocks"),
)
"""The default path is the path of the first line that applies and that supports the inputs. The
lines for TPUs and GPUs are based on compiled programs
(``benchmarks/results/abstract-devices/paths-v5e.md``, ``-h200.md``)."""


_ragged_path: ContextVar[str | None] = ContextVar("ragged_path", default=None)


@contextmanager
def ragged_batches(*, exact: bool) -> Iterator[None]:
    """Trace attention for batches whose rows have very different lengths.

    Within this context, the path ``even`` or ``pages`` replaces the defaults ``blocks`` and
    ``buckets``. If ``exact``, it is ``even``: the result of each row is then bitwise independent of
    the other rows. Kernels guarantee this in any case.
    """
    token = _ragged_path.set("even" if exact else "pages")
    try:
        yield
    finally:
        _ragged_path.reset(token)


def select_path(name: str | None, policy: CachePolicy, queries: int) -> Path:
    """Return the path with a name, or the default path for ``queries`` queries per row.

    Raises:
      ValueError: if the name is unknown.
    """
    if name is None:
        placement = policy.placement
        return _first(default_paths(placement.target(), placement.needs_tail, queries))
    if name not in PATHS:
        raise ValueError(f"unknown attention path {name!r}: choose from {', '.join(PATHS)}")
    return PATHS[name]


def default_paths(target: Target, needs_tail: bool, queries: int) -> tuple[str, ...]:
    """Return the names of the paths to try, in order, for a target, ``queries`` queries per row,
    and layers with or without a tail."""
    features = {None, *_features_of(target)}
    paths = [
        path
        for feature, tail, most, path in TABLE
        if feature in features and tail in (None, needs_tail) and (most is None or queries <= most)
    ]
    # Kernels are the only paths that may not support the inputs.
    fallback = _ragged_path.get() or next(path for path in paths if path != "pallas")
    return (*itertools.takewhile("pallas".__eq__, paths), fallback)


def _features_of(target: Target) -> set[str]:
    """Return the features of a target."""
    if target.platform == "cpu":
        return {BRANCHES}
    # A compiler that partitions the program among devices can't partition a kernel.
    return {KERNELS} if kernels_for(target) and not has_auto_axes() else set()


@functools.lru_cache(maxsize=16)
def _first(names: tuple[str, ...]) -> Path:
    """Return a path that calls the first of the paths ``names`` that supports the inputs."""
    if len(names) == 1:
        return PATHS[names[0]]

    def first(inputs: AttentionInputs) -> AttentionOutput:
        for name in names[:-1]:
            try:
                return PATHS[name](inputs)
            except Unsupported:
                continue
        return PATHS[names[-1]](inputs)

    return first
