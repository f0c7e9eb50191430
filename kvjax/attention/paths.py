"""Attention paths: implementations that compute the same output, and which one is the default."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvjax.attention.blocks import MAX_QUERIES, blockwise, bucketed, reference
from kvjax.attention.kernels.dispatch import kernels_for, pallas
from kvjax.attention.ragged import evenly, over_pages
from kvjax.attention.softmax import AttentionInputs, Unsupported
from kvjax.core.mesh_context import has_auto_axes
from kvjax.core.target import Target
from kvjax.core.typing import AttentionOutput
from kvjax.policies.cache_policy import CachePolicy

Path = Callable[[AttentionInputs], AttentionOutput]
"""Computes the attention output. A path raises ``Unsupported`` while it is traced if it does not
support the inputs."""

PATHS: dict[str, Path] = {
    "blocks": blockwise,
    "reference": reference,
    "buckets": bucketed,
    "pallas": pallas,
    "even": evenly,
    "pages": over_pages,
}

DIFFERENTIABLE = blockwise, reference, bucketed
"""Paths with derivatives. The derivative of the other paths is that of ``blocks``."""

BRANCHES, KERNELS = "cheap branches", "kernels"
"""What a target supports."""

TABLE = (
    # what the target supports, whether a tail is needed, the most queries per row; None is any
    (BRANCHES, None, None, "blocks"),
    (None, True, None, "blocks"),  # fetches no more than what is filled
    (KERNELS, None, None, "pallas"),
    (None, None, MAX_QUERIES, "buckets"),
    (None, None, None, "blocks"),
)
"""The default path is that of the first line that applies and supports the inputs. The lines for
TPUs and GPUs rest on compiled programs
(``benchmarks/results/abstract-devices/paths-v5e.md``, ``-h200.md``)."""


_ragged_path: ContextVar[str | None] = ContextVar("ragged_path", default=None)


@contextmanager
def ragged_batches(*, exact: bool) -> Iterator[None]:
    """Trace attention in this context for batches whose rows have very different lengths, where the
    default would be ``blocks`` or ``buckets``.

    ``exact``: the result of each row must not depend, to the last bit, on the other rows. Kernels
    guarantee that in any case.
    """
    token = _ragged_path.set("even" if exact else "pages")
    try:
        yield
    finally:
        _ragged_path.reset(token)


def select_path(name: str | None, policy: CachePolicy, queries: int) -> Path:
    """The path with a name, or the default for ``queries`` queries per row.

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
    """The names of the paths to try for a target, ``queries`` queries per row, and a placement that
    keeps the body of a layer after a tail or does not."""
    features = {None, *_features_of(target)}
    paths = [
        path
        for feature, tail, most, path in TABLE
        if feature in features and tail in (None, needs_tail) and (most is None or queries <= most)
    ]
    # Only kernels may not support the inputs.
    fallback = _ragged_path.get() or next(path for path in paths if path != "pallas")
    return (*itertools.takewhile("pallas".__eq__, paths), fallback)


def _features_of(target: Target) -> set[str]:
    """What a target supports."""
    if target.platform == "cpu":
        return {BRANCHES}
    # A compiler that partitions the program among devices can't partition a kernel.
    return {KERNELS} if kernels_for(target) and not has_auto_axes() else set()


@functools.lru_cache(maxsize=16)
def _first(names: tuple[str, ...]) -> Path:
    """The first of some paths that supports the inputs."""
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
