"""Which way attention goes: a table, and the ways."""

import importlib
from collections.abc import Callable

from kvjax.attention.blocks import at_once, blockwise
from kvjax.attention.buckets import SHORT, bucketed
from kvjax.attention.call import Call
from kvjax.core.typing import Mixed
from kvjax.policies.cache_policy import CachePolicy

Path = Callable[[Call], Mixed]
"""The mixture that a call's queries see. All paths give the same; one that can't serve a call
raises ``ValueError`` when it is traced."""


TABLE = (
    # platform, whether the body is behind a tail, queries a call at most: None for all
    ("cpu", None, None, "blocks"),
    (None, True, None, "blocks"),  # fetches what is filled, and no more
    (None, None, SHORT, "buckets"),
    (None, None, None, "blocks"),
)
"""The first line that fits counts. What stands in no line is asked for by name: none of it has been
measured on a device."""


def _kernel(module: str, name: str) -> Path:
    """A path of ``kvjax.attention.kernels``, whose libraries are loaded when it is first asked for:
    they take up to a second, and most programs need none."""

    def by_kernel(call: Call) -> Mixed:
        return getattr(importlib.import_module(f"kvjax.attention.kernels.{module}"), name)(call)

    return by_kernel


PATHS: dict[str, Path] = {
    "blocks": blockwise, "reference": at_once, "buckets": bucketed,
    "pallas": _kernel("pallas", "pallas"),
    **{name: _kernel("libraries", name) for name in ("cudnn", "splash", "paged")},
}  # fmt: skip

_FOR = {"pallas": "gpu", "cudnn": "gpu", "splash": "tpu", "paged": "tpu"}
"""What is written for one platform; on a CPU it is at most tried out."""


def path_of(name: str | None, policy: CachePolicy, queries: int) -> Path:
    """The path of a name, or by the table for calls of so many queries a row.

    Raises:
      ValueError: if there is no such path, or it is written for another platform.
    """
    platform = policy.placement.platform()
    if name is None:
        name = by_table(platform, policy.placement.behind_tail, queries)
    if name not in PATHS:
        raise ValueError(f"unknown attention path {name!r}: there are {', '.join(PATHS)}")
    if platform not in ("cpu", _FOR.get(name, platform)):
        raise ValueError(f"the attention path {name!r} is for a {_FOR[name]}, not for a {platform}")
    return PATHS[name]


def by_table(platform: str, behind_tail: bool, queries: int) -> str:
    """The name of the path for a platform (cpu, gpu, tpu), a body that a placement keeps behind a
    tail or not, and so many queries."""
    return next(
        path
        for on, behind, most, path in TABLE
        if on in (None, platform)
        and behind in (None, behind_tail)
        and (most is None or queries <= most)
    )
