"""Compile the programs of guided steps, guided drafts and beam searches, from shapes only.

Each function here returns a dict with the names of programs, and for each a function without
arguments that compiles it.
"""

import functools
from collections.abc import Callable
from inspect import unwrap

import jax
import jax.numpy as jnp
from jax.stages import Compiled
from jax.typing import DTypeLike
from jaxtyping import PyTree

from kvjax.generation.beams import programs as beam_programs
from kvjax.generation.beams.step import SearchParams, initial_state
from kvjax.generation.guides import session as guided_drafts
from kvjax.generation.guides import session as guided_session
from kvjax.generation.model import Model
from kvjax.generation.programs import MAX_STEPS
from kvjax.generation.request import GenerationRequest
from kvjax.sampling.scores import Scores

CompileProgram = Callable[
    [Callable[..., PyTree], tuple[int, ...], tuple[PyTree, ...], tuple[PyTree, ...]], Compiled
]
"""A function that compiles a function. Its other arguments are the indices of donated arguments,
the arguments as shapes, and the results as shapes."""
Compilers = dict[str, Callable[[], Compiled]]
"""Functions that compile a program, by name."""


def guided_programs(
    request: GenerationRequest,
    architecture: Model,
    params: PyTree,
    context: PyTree,
    logits: PyTree,
    past: PyTree,
    progress: PyTree,
    words: int,
    scores: PyTree,
    compile_program: CompileProgram,
) -> Compilers:
    """Return compilers of the two programs of a guided step.

    Args:
      request: the request.
      architecture, params: the model and the shapes of its parameters.
      context, logits, past, progress, scores: shapes. ``scores`` has one token per row.
      words: the number of words of a token mask.
      compile_program: the function that compiles a program.
    """
    rows = logits.shape[0]
    limit, halt = _shape(jnp.int32), _shape(jnp.bool_, rows)
    allowed, tokens = _shape(jnp.uint32, rows, words), _shape(jnp.int32, rows, 1)

    def feed() -> Compiled:
        call = functools.partial(unwrap(guided_session.forward), architecture)
        return compile_program(call, (1,), (params, context, progress, halt), (context, logits))

    def choose() -> Compiled:
        def call(logits: PyTree, *rest: PyTree) -> PyTree:
            return unwrap(guided_session.choose)(logits, request.filters, *rest, request.logprobs)

        arguments = logits, request.sampling, limit, progress, past, halt, allowed
        return compile_program(call, (4,), arguments, (progress, past, tokens, scores))

    return {"feed": feed, "choose": choose}


def drafted_guided_programs(
    request: GenerationRequest,
    architecture: Model,
    params: PyTree,
    context: PyTree,
    past: PyTree,
    progress: PyTree,
    words: int,
    vocab: int,
    drafts: tuple[PyTree, ...],
    compile_program: CompileProgram,
) -> Compilers:
    """Return compilers of the three programs of a guided step with drafts.

    Args:
      request, architecture, params, context, past, progress, words: as for ``guided_programs``.
      vocab: the size of the vocabulary.
      drafts: the proposer, and the shapes of its parameters, its context and its acceptance
        statistics.
      compile_program: the function that compiles a program.
    """
    proposer, draft_params, draft_context, acceptance = drafts
    rows, places = progress.token.shape[0], 1 + proposer.length
    number, halt = _shape(jnp.int32), _shape(jnp.bool_, rows)
    drafted = _shape(jnp.int32, rows, proposer.length), _shape(jnp.int32, rows)
    logits = _shape(jnp.float32, rows, places, vocab)
    allowed, tokens = _shape(jnp.uint32, rows, places, words), _shape(jnp.int32, rows, places)
    scores = None
    if request.logprobs is not None:
        scores = jax.eval_shape(functools.partial(Scores.zeros, (rows, places), request.logprobs))

    def propose() -> Compiled:
        def call(params: PyTree, context: PyTree, acceptance: PyTree, *rest: PyTree) -> PyTree:
            return unwrap(guided_drafts.propose)(
                proposer, params, context, acceptance, request.filters, *rest
            )

        state = progress, past, halt, request.sampling, number, number
        arguments = draft_params, draft_context, acceptance, *state
        return compile_program(call, (1,), arguments, (drafted, draft_context))

    def feed() -> Compiled:
        call = functools.partial(unwrap(guided_drafts.feed), architecture)
        arguments = params, context, progress, drafted, halt
        return compile_program(call, (1,), arguments, (context, logits))

    def check() -> Compiled:
        def call(*arguments: PyTree) -> PyTree:
            rows, rest = arguments[:5], arguments[5:]
            (*contexts,), results = unwrap(guided_drafts.verify)(
                proposer, *rows, request.filters, *rest, request.logprobs
            )
            return *contexts, *results

        state = request.sampling, number, progress, past, halt, allowed
        arguments = context, draft_context, acceptance, logits, drafted, *state
        results = context, draft_context, acceptance, progress, past, tokens, scores
        return compile_program(call, (0, 1, 8), arguments, results)

    return {"propose": propose, "feed drafts": feed, "check": check}


def search_programs(
    request: GenerationRequest,
    architecture: Model,
    params: PyTree,
    context: PyTree,
    logits: PyTree,
    past: PyTree,
    words: int,
    compile_program: CompileProgram,
) -> Compilers:
    """Return compilers of the programs of a beam search: first tokens, and the search loop or a
    guided step.

    Args:
      request, architecture, params, words, compile_program: as for ``guided_programs``.
      context, logits, past: shapes with one row per beam.
    """
    search, filters, logprobs = request.search, request.filters, request.logprobs
    assert search is not None and search.beams is not None
    beams, rows = search.beams, logits.shape[0]
    number, limit = _shape(jnp.float32), _shape(jnp.int32)
    search_params = SearchParams(number, limit, number)
    real_prompts, lengths = _shape(jnp.bool_, len(request.prompts)), _shape(jnp.int32, rows)
    allowed = _shape(jnp.uint32, rows, words)
    state = jax.eval_shape(
        functools.partial(initial_state, beams=beams, scores=logprobs), real_prompts, lengths
    )

    def columns(width: int) -> PyTree:
        tokens = _shape(jnp.int32, rows, width)
        if logprobs is None:
            return tokens, tokens, None
        zeros = functools.partial(Scores.zeros, (rows, width), logprobs)
        return tokens, tokens, jax.eval_shape(zeros)

    def begin() -> Compiled:
        def call(logits: PyTree, *rest: PyTree) -> Compiled:
            arguments, masks = rest[:6], rest[6:]
            return unwrap(beam_programs.begin)(
                logits, filters, beams, *arguments, logprobs, request.mesh_sharding, *masks
            )

        masks = () if request.guides is None else (allowed,)
        state_arguments = request.sampling, search_params, limit, past, real_prompts, lengths
        arguments = logits, *state_arguments, *masks
        return compile_program(call, (4,), arguments, (state, past, columns(1)))

    def loop() -> Compiled:
        call = functools.partial(
            unwrap(beam_programs.search), architecture, filters, beams, scores=logprobs
        )
        arguments = params, context, state, past, request.sampling, search_params, limit, limit
        return compile_program(call, (1, 3), arguments, (context, state, past, columns(MAX_STEPS)))

    def feed() -> Compiled:
        call = functools.partial(unwrap(beam_programs.feed), architecture)
        return compile_program(call, (1,), (params, context, state), (context, logits))

    def choose() -> Compiled:
        def call(logits: PyTree, *rest: PyTree) -> PyTree:
            return unwrap(beam_programs.choose)(logits, filters, beams, *rest, logprobs)

        arguments = logits, context, state, past, request.sampling, search_params, limit, allowed
        return compile_program(call, (1, 3), arguments, (context, state, past, columns(1)))

    if request.guides is not None:
        return {"first tokens": begin, "feed": feed, "choose": choose}
    return {"first tokens": begin, "search": loop}


def _shape(dtype: DTypeLike, *shape: int) -> PyTree:
    return jax.ShapeDtypeStruct(shape, dtype)
