"""The programs of rows that have guides, for devices that need not be here."""

import functools
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.generation.guides import session as programs
from kvjax.generation.request import Request

Compile = Callable[[Callable[..., Any], tuple[int, ...], tuple[Any, ...], tuple[Any, ...]], Any]
"""Compiles a call with arguments, of which those of these numbers are donated, and its results:
all of them shapes."""


def guided_programs(
    request: Request, architecture: Any, params: Any, context: Any, logits: Any, past: Any,
    progress: Any, words: int, scores: Any, compiled: Compile,
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    """What compiles the two programs of a step, by name; ``words``: of a row's bits; ``scores``: of
    a token a row."""
    limit, rows = jax.ShapeDtypeStruct((), jnp.int32), logits.shape[0]
    halt = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    allowed = jax.ShapeDtypeStruct((rows, words), jnp.uint32)
    out = jax.ShapeDtypeStruct((rows, 1), jnp.int32)

    def feed() -> Any:
        call = functools.partial(unwrap(programs.feed), architecture)
        return compiled(call, (1,), (params, context, progress, halt), (context, logits))

    def choose() -> Any:
        def call(logits: Any, *rest: Any) -> Any:
            return unwrap(programs.choose)(logits, request.filters, *rest, request.scores)

        given = logits, request.settings, limit, progress, past, halt, allowed
        return compiled(call, (4,), given, (progress, past, out, scores))

    return {"feed": feed, "choose": choose}
