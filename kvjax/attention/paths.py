"""Which way attention goes: a table, and the ways."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvjax.attention.alike import evenly
from kvjax.attention.blocks import at_once, blockwise
from kvjax.attention.buckets import SHORT, bucketed
from kvjax.attention.in_place import over_pages
from kvjax.attention.inputs import AttentionInputs, Unsupported
from kvjax.attention.kernels.dispatch import kernels_for, pallas
from kvjax.core.mesh_context import has_auto_axes
from kvjax.core.target import Target
from kvjax.core.typing import AttentionOutput
from kvjax.policies.cache_policy import CachePolicy

Path = Callable[[AttentionInputs], AttentionOutput]
"""The mixture that a call's queries see. All paths give the same; one that can't serve a call
raises ``Unsupported`` when it is traced."""


BRANCHES, KERNELS = "takes branches at no cost", "has kernels"
"""What a target can do."""

TABLE = (
    # what the target can do, whether the body is behind a tail, queries a call: None for any
    (BRANCHES, None, None, "blocks"),
    (None, True, None, "blocks"),  # fetches what is filled, and no more
    (KERNELS, None, None, "pallas"),
    (None, None, SHORT, "buckets"),
    (None, None, None, "blocks"),
)
"""The first line that fits, and whose path serves the call, counts. Those of TPUs and GPUs go by
what their compilers show (``benchmarks/results/abstract-devices/paths-v5e.md``, ``-h200.md``)."""


def abilities(target: Target) -> set[str]:
    """What a target can do."""
    if target.platform == "cpu":
        return {BRANCHES}
    # Where the compiler divides a program among devices, it can't divide a kernel.
    return {KERNELS} if kernels_for(target) and not has_auto_axes() else set()


PATHS: dict[str, Path] = {
    "blocks": blockwise, "reference": at_once, "buckets": bucketed, "pallas": pallas,
    "even": evenly, "pages": over_pages,
}  # fmt: skip


DIFFERENTIABLE = blockwise, at_once, bucketed
"""What has a derivative, whatever is asked; that of the others is the walk's."""


_mixed: ContextVar[str | None] = ContextVar("mixed", default=None)


@contextmanager
def rows_of_any_length(*, exact: bool) -> Iterator[None]:
    """Trace attention inside for rows that are as long as they like, where the table says
    ``blocks`` or ``buckets``. ``exact``: such that each row's result is, to the last bit, the same
    whatever the others hold, as it is by kernels in any case."""
    token = _mixed.set("even" if exact else "pages")
    try:
        yield
    finally:
        _mixed.reset(token)


def path_of(name: str | None, policy: CachePolicy, queries: int) -> Path:
    """The path of a name, or by the table for calls of so many queries a row.

    Raises:
      ValueError: if there is no such path.
    """
    if name is None:
        placement = policy.placement
        return _first(by_table(placement.target(), placement.needs_tail, queries))
    if name not in PATHS:
        raise ValueError(f"unknown attention path {name!r}: there are {', '.join(PATHS)}")
    return PATHS[name]


def by_table(target: Target, needs_tail: bool, queries: int) -> tuple[str, ...]:
    """The names of the paths for a target, a body that a placement keeps behind a tail or not, and
    so many queries: the first that serves a call is taken."""
    able = {None, *abilities(target)}
    found = [
        path
        for ability, behind, most, path in TABLE
        if ability in able and behind in (None, needs_tail) and (most is None or queries <= most)
    ]
    # Kernels alone may not serve a call.
    other = _mixed.get() or next(x for x in found if x != "pallas")
    return (*itertools.takewhile("pallas".__eq__, found), other)


@functools.lru_cache(maxsize=16)
def _first(names: tuple[str, ...]) -> Path:
    """The first of some paths that serves a call."""
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
