"""What paths by kernels share: their refusals, and how kernels run where no device has them."""

import functools
from collections.abc import Callable
from typing import Any

from jax import lax

from kvjax.core.typing import Array


def refuse(path: str, reasons: dict[str, object]) -> None:
    """Raise ``ValueError`` for the first reason that is true."""
    for reason, true in reasons.items():
        if true:
            raise ValueError(f"the attention path {path!r} {reason}")


def compiled(run: Callable[..., Any], *arrays: Array) -> Any:
    """``run(*arrays, interpret=)``, without a device's compiler on CPUs."""
    on_cpu, elsewhere = (functools.partial(run, interpret=each) for each in (True, False))
    return lax.platform_dependent(*arrays, cpu=on_cpu, default=elsewhere)
