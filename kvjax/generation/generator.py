"""Generate text from prompts: all of it, piece by piece, the best samples, or only a cache."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
from jax.sharding import Mesh

from kvjax.cache.state import KVCache
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.validation import donation_errors
from kvjax.generation.beams.programs import keep_rows, rows_to_keep
from kvjax.generation.beams.streaming import BeamStream
from kvjax.generation.encoder import check_encoded
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.options import (
    CacheChoice,
    GenerateKeywords,
    GenerationOptions,
    Prompts,
    explicit_signature,
)
from kvjax.generation.request import GenerationRequest, PromptChunk, prepare_request, prompt_chunks
from kvjax.generation.results import GenerationResult, Piece, pad_result
from kvjax.generation.session import Session
from kvjax.generation.streaming import Stream
from kvjax.memory.planning import PREFILL_CHUNK
from kvjax.policies.model_config import position_limit
from kvjax.sampling.filters import Logits
from kvjax.sampling.scores import TokenScore


class BestOf(Iterator[Piece]):
    """A generation of several samples per prompt. Its result contains the best ones."""

    def __init__(
        self,
        lm: LanguageModel,
        request: GenerationRequest,
        *,
        chunks: list[PromptChunk] | None = None,
    ) -> None:
        logprobs = 0 if request.logprobs is None else request.logprobs
        all_samples = replace(request, logprobs=logprobs, padded=False, search=None)
        self._running = Stream(lm, all_samples, streamed=False, chunks=chunks)
        self._request, self._padding = request, getattr(lm, "pad_token_id", 0)
        self._result: GenerationResult | None = None

    def __next__(self) -> Piece:
        return next(self._running)

    def close(self) -> None:
        """End the generation."""
        self._running.close()

    @property
    def result(self) -> GenerationResult:
        """The best samples.

        Raises:
          RuntimeError: before the last piece.
        """
        if self._result is None:
            self._result = _best(self._running.result, self._request, self._padding)
        return self._result


def best_rows(
    logprobs: Sequence[Sequence[TokenScore]], samples: int, kept: int
) -> tuple[np.ndarray, list[float]]:
    """Rank the samples of each prompt by their mean log-probability.

    Args:
      logprobs: the scores of each row's tokens.
      samples: the number of rows per prompt.
      kept: how many rows per prompt to return.

    Returns:
      The best rows, int[prompts, kept], best first (equal rows in their order), and the mean
      log-probability of every row, minus infinity for a row without tokens.
    """
    means = [float(np.mean([x.logprob for x in row])) if row else -np.inf for row in logprobs]
    ranked = np.argsort(-np.reshape(means, (-1, samples)), axis=1, kind="stable")
    return np.arange(len(ranked))[:, None] * samples + ranked[:, :kept], means


def _best(result: GenerationResult, request: GenerationRequest, padding: int) -> GenerationResult:
    """Select the best rows of each prompt."""
    search, samples = request.search, request.samples
    assert search is not None
    rows, means = best_rows(result.logprobs, samples, search.num_return)
    selected = rows.ravel().tolist()
    cache = result.cache
    if cache is not None:
        cache = keep_rows(cache, *rows_to_keep(rows, np.zeros_like(rows), request))

    def select(values: Any) -> Any:
        return None if values is None else [values[row] for row in selected]

    result = replace(
        result,
        text=select(result.text),
        tokens=select(result.tokens),
        pending_tokens=select(result.pending_tokens),
        cache=cache,
        logprobs=None if request.logprobs is None else select(result.logprobs),
        sequence_scores=select(means),
        guides=result.guides and tuple(select(result.guides)),
        stats=replace(result.stats, finish_reasons=tuple(select(result.stats.finish_reasons))),
    )
    if request.padded:
        return pad_result(result, request.max_new_tokens, padding, request.logprobs)
    return result


RunningGeneration = Stream | BeamStream | BestOf
"""A generation as an iterator over pieces. After the last piece it has a ``result``."""


@explicit_signature(GenerateKeywords)
@without_mesh_context
def generate(
    lm: LanguageModel, prompts: Prompts, **settings: Unpack[GenerateKeywords]
) -> GenerationResult:
    """Continue prompts. Decoding is greedy unless a temperature is given, even if the checkpoint
    recommends a temperature.

    Args:
      lm: a model from ``kvjax.models.load``.
      prompts: a text, a list of texts, or a list of lists of token ids. Lengths may differ. If the
        model has an encoder, it reads the prompts once. The codecs and placements of ``cache``
        apply to its output too.
      max_new_tokens: the maximum number of new tokens per row.
      cache: a policy, its name, a list with one policy per layer, or the ``KVCache`` of an earlier
        result. Prompts are appended to a given cache. Prompts should begin with
        ``result.pending_tokens``, the last new tokens of each row, because the cache does not
        contain them. A given cache is donated; to use it again, pass a ``kvjax.fork`` of it.
      max_len: the maximum number of tokens per row in the cache. The default is the number that the
        request needs, rounded up to 2**k or 3 * 2**k so that similar lengths share compiled
        programs. It is not rounded if this would change the frequencies of length-dependent rotary
        embeddings (dynamic, longrope). kvjax computes these frequencies for ``max_len``, and
        Transformers for the current length. So for such a model, a larger ``max_len`` beyond the
        trained length changes every logit.
      rotary_len: the length for which these frequencies are computed, instead of ``max_len``.
      seed: an integer, so that row ``i`` of the result draws with the seed ``seed + i``, or a list
        with one seed per row. The draws of a row do not depend on other rows.
      {sampling parameters}
      logit_bias: a mapping from token ids to numbers that are added to the logits of these tokens.
      stop: strings that end a row. The row's text ends before the string.
      eos_token_ids: tokens that end a row; by default the checkpoint's. These and the
        decoder's start token are the only values that kvjax takes from ``generation_config.json``.
      use_cache: if False, the whole sequence is processed again for every token. This is the
        baseline for comparisons.
      prefill_chunk: the number of tokens of the chunks in which prompts are prefilled. The last
        chunk is padded to a power of two.
      limits: the maximum numbers of rows, tokens and bytes of a request
        (``kvjax.memory.InferenceLimits``).
      mesh: devices over which the model and the cache are sharded, see ``make_mesh``. The default
        is the mesh on which the model was loaded. Moving the model takes time, so load a model that
        you use often on its mesh. If the number of rows is not a multiple of ``data``, empty rows
        are added; ``result.cache`` contains them too.
      n: the number of continuations of each prompt. They are consecutive rows of the result, so
        their seeds are consecutive. The prompt is prefilled once, and a paged cache stores its full
        pages once.
      best_of: the number of continuations to draw for each prompt, at least ``n``. The ``n`` whose
        tokens have the highest mean log-probability under the model's distribution are returned,
        best first. ``stream`` does not support ``best_of``.
      num_beams: the number of beams per prompt. Above 1, a beam search runs as in Transformers, and
        the ``n`` best sequences are returned, best first (``result.sequence_scores``). Penalties,
        bias and hook then apply to log-probabilities. Beams share a prompt's prefill and pages like
        the continuations of ``n``.
      length_penalty: a sequence's score is its log-probability divided by its length to this power.
        Values above 0 favor longer sequences, below 0 shorter ones.
      early_stopping: the rule by which a search ends, once it has as many finished sequences as
        beams. With True, it ends immediately. With False, it ends when no unfinished beam has a
        higher score at present than the worst of these sequences. With "never", it ends when no
        beam can reach a higher score than that.
      num_beam_groups, diversity_penalty: the number of groups into which beams are divided, and a
        penalty. After the other penalties, a token's score is reduced by this penalty for each beam
        of an earlier group that chose the same token in the same step (Vijayakumar et al., "Diverse
        Beam Search", arXiv:1610.02424).
      prefix_cache: a ``PrefixTree``, or ``tree.for_tenant(tenant)``. Prompt tokens that the tree
        has cached are not computed again, and the tree caches the others. The tree has its own
        policy, so ``cache`` is not allowed. Threads that share a tree take turns.
      logprobs: whether to report two log-probabilities of each new token (``result.logprobs``). The
        first is under the model's distribution, before bias, filters and temperature. The second is
        under the filtered distribution from which the token was drawn. With an integer ``k`` from 0
        to 20, the ``k`` most likely tokens are reported too. True is the same as 0.
      guide: a constraint from ``Guides`` that new text must match, or a list with a guide or None
        for each prompt. Each row advances its own copy (``result.guides``), so a guide can be used
        again. A row with a guide ends at the end of its grammar, or at ``max_new_tokens``. A beam
        copies the guide of the beam that it continues.
      padded: whether ``result.tokens`` and log-probabilities are arrays with ``max_new_tokens``
        entries per row. ``result.lengths`` then has the number of real tokens of each row.
      logits_hook: a function ``hook(logits, tokens, length) -> logits`` that changes the logits
        before all other sampling steps. ``logits``: float32[batch, vocab]. ``tokens``: int32[batch,
        room], the prompt and the new tokens of each row, then padding. ``length``: int32[batch],
        how many of ``tokens`` are real. The hook must be pure and use jax.numpy. It is traced once
        for every program.
      draft: the draft, which proposes tokens that the model verifies, several per pass. It is
        ``"lookup"`` or ``PromptLookup`` for tokens that followed the same tokens earlier in the
        sequence, another model with the same tokenizer, or a ``DraftModel``. The result is the same
        as without a draft, token for token, except for near ties, because a pass over several
        tokens rounds its last bits differently. ``stats.speculation`` says how many passes were
        saved.

    Raises:
      ValueError: if a prompt is empty or has a token outside the vocabulary, prompt and new tokens
        exceed ``max_len`` or the model's positions, or an argument is out of its range. These
        errors are raised before the model runs.
      CacheOverflowError: if the given cache had already overflowed.
      NonFiniteError: if logits are not finite. No token is drawn from them.

    Example:
      ```python
      result = kvjax.generate(lm, ["The json module", "An iterator"], max_new_tokens=8)
      print(result.text)
      more = kvjax.generate(lm, result.pending_tokens, cache=result.cache, max_new_tokens=8)
      ```
    """
    return run_generation(*_prepare(lm, prompts, settings))


@explicit_signature(GenerateKeywords)
@without_mesh_context
def stream(
    lm: LanguageModel, prompts: Prompts, **settings: Unpack[GenerateKeywords]
) -> RunningGeneration:
    """Continue prompts, and return the text as it is generated. Arguments and errors are as for
    ``generate``.

    Returns:
      An iterator over ``Piece``s. Incomplete characters, and text that may be the beginning of a
      stop string, are withheld until they are complete. So the joined pieces of a row are exactly
      its text and tokens. After the last piece, ``.result`` is what ``generate`` would have
      returned. Arguments are checked when ``stream`` is called. ``NonFiniteError``, and errors of a
      ``prefix_cache``, are raised by the iteration, because the prefix tree leases its pages when
      the first piece is requested.

    Example:
      ```python
      for piece in kvjax.stream(lm, "The json module", max_new_tokens=8):
          print(piece.text[0], end="", flush=True)
      ```
    """
    return start_generation(*_prepare(lm, prompts, settings), streamed=True)


def _prepare(
    lm: LanguageModel, prompts: Prompts, settings: GenerateKeywords
) -> tuple[LanguageModel, GenerationRequest]:
    options = GenerationOptions(**settings)
    lm = lm if options.mesh is None else lm.on(options.mesh)
    with donation_errors(isinstance(options.cache, KVCache)):
        return lm, prepare_request(lm, prompts, options)


@without_mesh_context
def prefill(
    lm: LanguageModel,
    prompts: Prompts,
    *,
    cache: CacheChoice = "static",
    max_len: int | None = None,
    rotary_len: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    mesh: Mesh | None = None,
) -> tuple[KVCache, Logits]:
    """Process prompts into a cache, as ``generate`` does before it chooses the first token.

    Args:
      lm, prompts, cache, max_len, rotary_len, prefill_chunk, mesh: as for ``generate``. By default
        the cache has room for at least one more token, if the model has a position for it.

    Returns:
      The cache, and the logits after each prompt, float32[batch, vocab], from which you can start
      your own decode loop. ``kvjax.repeat(cache, n)`` repeats each prompt ``n`` times.

    Raises:
      ValueError, CacheOverflowError: for the same reasons as ``generate``.

    Example:
      ```python
      cache, logits = kvjax.prefill(lm, ["The json module"], max_len=64)
      token = jnp.argmax(logits, axis=-1)
      ```
    """
    check_encoded(lm)
    lm = lm if mesh is None else lm.on(mesh)
    options = GenerationOptions(
        max_new_tokens=1,
        cache=cache,
        max_len=max_len,
        rotary_len=rotary_len,
        prefill_chunk=prefill_chunk,
    )
    request = prepare_request(lm, prompts, options)
    full = request.capacity == request.positions != position_limit(lm.config)
    if max_len is None and request.cache is None and full:
        # Reserve a position for the token that the caller appends next.
        request = prepare_request(lm, prompts, replace(options, max_new_tokens=2))
    session = Session(lm, request)
    session.start()
    for chunk in prompt_chunks(request):
        session.make_room(chunk.cache_len)
        session.prefill(chunk)
    session.check()
    assert session.cache is not None
    return session.cache, session.logits[: request.rows]


def start_generation(
    lm: LanguageModel,
    request: GenerationRequest,
    *,
    streamed: bool,
    chunks: list[PromptChunk] | None = None,
) -> RunningGeneration:
    """Create a generation that runs while you iterate over it.

    Args:
      lm, request: the model and a checked request.
      streamed: whether a reader uses the text while it is generated.
      chunks: the prompts in chunks, if they are already on the device.

    Raises:
      ValueError: if ``best_of`` is streamed.
    """
    search = request.search
    if search is None:
        return Stream(lm, request, streamed=streamed, chunks=chunks)
    if search.beams is not None:
        return BeamStream(lm, request, streamed=streamed, chunks=chunks)
    if streamed:
        raise ValueError("best_of can't be streamed: the best sample is known only at the end")
    return BestOf(lm, request, chunks=chunks)


def run_generation(
    lm: LanguageModel, request: GenerationRequest, *, chunks: list[PromptChunk] | None = None
) -> GenerationResult:
    """Run a generation to its end. Threads that use the same prefix tree take turns."""
    pieces = start_generation(lm, request, streamed=False, chunks=chunks)
    prefixes = request.prefix_cache
    with nullcontext() if prefixes is None else prefixes.tree.lease_lock.acquire():
        for _ in pieces:
            pass
    return pieces.result
