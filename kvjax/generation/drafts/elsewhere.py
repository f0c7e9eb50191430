"""The programs of drafts beside guides, for devices that need not be here."""

import functools
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.generation.drafts import guided
from kvjax.generation.guides.elsewhere import Compile
from kvjax.generation.request import Request
from kvjax.sampling.scores import Scores


def drafted_guided_programs(
    request: Request, architecture: Any, params: Any, context: Any, past: Any, progress: Any,
    words: int, vocab: int, drafts: tuple[Any, ...], compiled: Compile,
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    """What compiles the three programs of a step, by name. ``words``: of a row's bits; ``drafts``:
    what proposes, its parameters, its cache, and how it fares."""
    drafter, its, held, fared = drafts
    rows, places = progress.token.shape[0], 1 + drafter.length

    def of(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    number, halt = jax.ShapeDtypeStruct((), jnp.int32), of(jnp.bool_)
    drafted, out = (of(jnp.int32, drafter.length), of(jnp.int32)), of(jnp.int32, places)
    logits, allowed = of(jnp.float32, places, vocab), of(jnp.uint32, places, words)
    told = None
    if request.scores is not None:
        told = jax.eval_shape(functools.partial(Scores.zeros, (rows, places), request.scores))

    def propose() -> Any:
        def call(its: Any, held: Any, fared: Any, *rest: Any) -> Any:
            return unwrap(guided.propose)(drafter, its, held, fared, request.filters, *rest)

        given = its, held, fared, progress, past, halt, request.settings, number, number
        return compiled(call, (1,), given, (drafted, held))

    def feed() -> Any:
        call = functools.partial(unwrap(guided.feed), architecture)
        given = params, context, progress, drafted, halt
        return compiled(call, (1,), given, (context, logits))

    def check() -> Any:
        def call(context: Any, held: Any, fared: Any, logits: Any, drafted: Any, *rest: Any) -> Any:
            given = context, held, fared, logits, drafted, request.filters, *rest
            (*texts,), found = unwrap(guided.check)(drafter, *given, request.scores)
            return *texts, *found

        given = (
            context, held, fared, logits, drafted, request.settings, number, progress, past, halt,
            allowed,
        )  # fmt: skip
        return compiled(call, (0, 1, 8), given, (context, held, fared, progress, past, out, told))

    return {"propose": propose, "feed drafts": feed, "check": check}
