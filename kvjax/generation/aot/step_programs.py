"""Compile the programs of guided steps, guided drafts and beam searches, from shapes."""

import functools
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.generation.beams import programs as beam_programs
from kvjax.generation.beams.step import SearchParams, initial_state
from kvjax.generation.drafts import guided as guided_drafts
from kvjax.generation.guides import session as guided_session
from kvjax.generation.programs import MAX_STEPS
from kvjax.generation.request import GenerationRequest
from kvjax.sampling.scores import Scores

CompileProgram = Callable[
    [Callable[..., Any], tuple[int, ...], tuple[Any, ...], tuple[Any, ...]], Any
]
"""Compiles a call with arguments, of which those of these numbers are donated, and its results:
all of them shapes."""


def guided_programs(
    request: GenerationRequest,
    architecture: Any,
    params: Any,
    context: Any,
    logits: Any,
    past: Any,
    progress: Any,
    words: int,
    scores: Any,
    compiled: CompileProgram,
) -> dict[str, Callable[[], Any]]:
    """What compiles the two programs of a step, by name; ``words``: of a row's bits; ``scores``: of
    a token a row."""
    limit, rows = jax.ShapeDtypeStruct((), jnp.int32), logits.shape[0]
    halt = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    allowed = jax.ShapeDtypeStruct((rows, words), jnp.uint32)
    out = jax.ShapeDtypeStruct((rows, 1), jnp.int32)

    def feed() -> Any:
        call = functools.partial(unwrap(guided_session.forward), architecture)
        return compiled(call, (1,), (params, context, progress, halt), (context, logits))

    def choose() -> Any:
        def call(logits: Any, *rest: Any) -> Any:
            return unwrap(guided_session.choose)(logits, request.filters, *rest, request.logprobs)

        given = logits, request.sampling, limit, progress, past, halt, allowed
        return compiled(call, (4,), given, (progress, past, out, scores))

    return {"feed": feed, "choose": choose}


def drafted_guided_programs(
    request: GenerationRequest,
    architecture: Any,
    params: Any,
    context: Any,
    past: Any,
    progress: Any,
    words: int,
    vocab: int,
    drafts: tuple[Any, ...],
    compiled: CompileProgram,
) -> dict[str, Callable[[], Any]]:
    """What compiles the three programs of a step, by name. ``words``: of a row's bits; ``drafts``:
    what proposes, its parameters, its cache, and how it fares."""
    proposer, its, held, fared = drafts
    rows, places = progress.token.shape[0], 1 + proposer.length

    def of(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    number, halt = jax.ShapeDtypeStruct((), jnp.int32), of(jnp.bool_)
    drafted, out = (of(jnp.int32, proposer.length), of(jnp.int32)), of(jnp.int32, places)
    logits, allowed = of(jnp.float32, places, vocab), of(jnp.uint32, places, words)
    told = None
    if request.logprobs is not None:
        told = jax.eval_shape(functools.partial(Scores.zeros, (rows, places), request.logprobs))

    def propose() -> Any:
        def call(its: Any, held: Any, fared: Any, *rest: Any) -> Any:
            return unwrap(guided_drafts.propose)(proposer, its, held, fared, request.filters, *rest)

        given = its, held, fared, progress, past, halt, request.sampling, number, number
        return compiled(call, (1,), given, (drafted, held))

    def feed() -> Any:
        call = functools.partial(unwrap(guided_drafts.feed), architecture)
        given = params, context, progress, drafted, halt
        return compiled(call, (1,), given, (context, logits))

    def check() -> Any:
        def call(context: Any, held: Any, fared: Any, logits: Any, drafted: Any, *rest: Any) -> Any:
            given = context, held, fared, logits, drafted, request.filters, *rest
            (*texts,), found = unwrap(guided_drafts.verify)(proposer, *given, request.logprobs)
            return *texts, *found

        given = (
            context,
            held,
            fared,
            logits,
            drafted,
            request.sampling,
            number,
            progress,
            past,
            halt,
            allowed,
        )
        return compiled(call, (0, 1, 8), given, (context, held, fared, progress, past, out, told))

    return {"propose": propose, "feed drafts": feed, "check": check}


def search_programs(
    request: GenerationRequest,
    architecture: Any,
    params: Any,
    context: Any,
    logits: Any,
    past: Any,
    words: int,
    compiled: CompileProgram,
) -> dict[str, Callable[[], Any]]:
    """What compiles the first tokens and the search, or the two programs of a step under guides, by
    name; ``context``, ``logits``, ``past``: of a row for each beam; ``words``: of a row's bits."""
    search, filters, scores = request.search, request.filters, request.logprobs
    assert search is not None and search.beams is not None
    beams, rows, prompts = search.beams, logits.shape[0], len(request.prompts)
    number: Any = jax.ShapeDtypeStruct((), jnp.float32)
    limit: Any = jax.ShapeDtypeStruct((), jnp.int32)
    numbers = SearchParams(number, limit, number)
    asked: Any = jax.ShapeDtypeStruct((prompts,), jnp.bool_)
    since: Any = jax.ShapeDtypeStruct((rows,), jnp.int32)
    state = jax.eval_shape(
        functools.partial(initial_state, beams=beams, scores=scores), asked, since
    )

    allowed = jax.ShapeDtypeStruct((rows, words), jnp.uint32)

    def columns(width: int) -> Any:
        each = jax.ShapeDtypeStruct((rows, width), jnp.int32)
        if scores is None:
            return each, each, None
        told = functools.partial(Scores.zeros, (rows, width), scores)
        return each, each, jax.eval_shape(told)

    def begin() -> Any:
        def call(
            logits: Any,
            settings: Any,
            numbers: Any,
            limit: Any,
            past: Any,
            asked: Any,
            since: Any,
            *allowed: Any,
        ) -> Any:
            given = logits, filters, beams, settings, numbers, limit, past, asked, since
            return unwrap(beam_programs.begin)(*given, scores, request.spread, *allowed)

        given = logits, request.sampling, numbers, limit, past, asked, since
        given += () if request.guides is None else (allowed,)
        return compiled(call, (4,), given, (state, past, columns(1)))

    def loop() -> Any:
        call = functools.partial(
            unwrap(beam_programs.search), architecture, filters, beams, scores=scores
        )
        given = params, context, state, past, request.sampling, numbers, limit, limit
        return compiled(call, (1, 3), given, (context, state, past, columns(MAX_STEPS)))

    def feed() -> Any:
        call = functools.partial(unwrap(beam_programs.feed), architecture)
        return compiled(call, (1,), (params, context, state), (context, logits))

    def choose() -> Any:
        def call(logits: Any, *rest: Any) -> Any:
            return unwrap(beam_programs.choose)(logits, filters, beams, *rest, scores)

        given = logits, context, state, past, request.sampling, numbers, limit, allowed
        return compiled(call, (1, 3), given, (context, state, past, columns(1)))

    if request.guides is not None:
        return {"first tokens": begin, "feed": feed, "choose": choose}
    return {"first tokens": begin, "search": loop}
