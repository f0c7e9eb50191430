"""The programs of a beam search, for devices that need not be here."""

import functools
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.generation.beams import programs
from kvjax.generation.beams.steps import Numbers, begun
from kvjax.generation.guides.elsewhere import Compile
from kvjax.generation.programs import CHUNK
from kvjax.generation.request import Request
from kvjax.sampling.scores import Scores


def search_programs(
    request: Request, architecture: Any, params: Any, context: Any, logits: Any, past: Any,
    words: int, compiled: Compile,
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    """What compiles the first tokens and the search, or the two programs of a step under guides, by
    name; ``context``, ``logits``, ``past``: of a row for each beam; ``words``: of a row's bits."""
    search, filters, scores = request.search, request.filters, request.scores
    assert search is not None and search.beams is not None
    beams, rows, prompts = search.beams, logits.shape[0], len(request.prompts)
    number: Any = jax.ShapeDtypeStruct((), jnp.float32)
    limit: Any = jax.ShapeDtypeStruct((), jnp.int32)
    numbers = Numbers(number, limit, number)
    asked: Any = jax.ShapeDtypeStruct((prompts,), jnp.bool_)
    since: Any = jax.ShapeDtypeStruct((rows,), jnp.int32)
    state = jax.eval_shape(functools.partial(begun, beams=beams, scores=scores), asked, since)

    allowed = jax.ShapeDtypeStruct((rows, words), jnp.uint32)

    def columns(width: int) -> Any:
        each = jax.ShapeDtypeStruct((rows, width), jnp.int32)
        if scores is None:
            return each, each, None
        told = functools.partial(Scores.zeros, (rows, width), scores)
        return each, each, jax.eval_shape(told)

    def begin() -> Any:
        def call(
            logits: Any, settings: Any, numbers: Any, limit: Any, past: Any, asked: Any, since: Any,
            *allowed: Any,
        ) -> Any:  # fmt: skip
            given = logits, filters, beams, settings, numbers, limit, past, asked, since
            return unwrap(programs.begin)(*given, scores, request.spread, *allowed)

        given = logits, request.settings, numbers, limit, past, asked, since
        given += () if request.guides is None else (allowed,)
        return compiled(call, (4,), given, (state, past, columns(1)))

    def loop() -> Any:
        call = functools.partial(
            unwrap(programs.search), architecture, filters, beams, scores=scores
        )
        given = params, context, state, past, request.settings, numbers, limit, limit
        return compiled(call, (1, 3), given, (context, state, past, columns(CHUNK)))

    def feed() -> Any:
        call = functools.partial(unwrap(programs.feed), architecture)
        return compiled(call, (1,), (params, context, state), (context, logits))

    def choose() -> Any:
        def call(logits: Any, *rest: Any) -> Any:
            return unwrap(programs.choose)(logits, filters, beams, *rest, scores)

        given = logits, context, state, past, request.settings, numbers, limit, allowed
        return compiled(call, (1, 3), given, (context, state, past, columns(1)))

    if request.guides is not None:
        return {"first tokens": begin, "feed": feed, "choose": choose}
    return {"first tokens": begin, "search": loop}
