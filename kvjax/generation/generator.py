"""Generate text from prompts: all at once, piece by piece, or only the prompts' cache."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Unpack

from jax.sharding import Mesh

from kvjax.cache.state import KVCache
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.validation import donation_errors
from kvjax.generation.beams.streaming import BeamStream
from kvjax.generation.best_of import BestOf
from kvjax.generation.encoder import check_encoded
from kvjax.generation.inputs import Prompts
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.options import (
    CacheChoice,
    GenerateKeywords,
    GenerationOptions,
    explicit_signature,
)
from kvjax.generation.request import GenerationRequest, PromptChunk, prepare_request, prompt_chunks
from kvjax.generation.results import GenerationResult
from kvjax.generation.session import Session
from kvjax.generation.streaming import Stream
from kvjax.memory.planning import PREFILL_CHUNK
from kvjax.policies.model_config import position_limit
from kvjax.sampling.filters import Logits

RunningGeneration = Stream | BeamStream | BestOf
"""An iterator over pieces, with the ``result`` after the last one."""


@explicit_signature(GenerateKeywords)
@without_mesh_context
def generate(
    lm: LanguageModel, prompts: Prompts, **settings: Unpack[GenerateKeywords]
) -> GenerationResult:
    """Continue prompts; greedy unless a temperature is given, whatever the checkpoint recommends.

    Args:
      lm: a model from ``kvjax.models.load``.
      prompts: a text, a list of texts, or a list of lists of token ids, of any lengths. A text
        alone is a batch of one. Of a model with an encoder they are what that reads, once; a cache
        policy's codecs and places are also those of what it made of them.
      max_new_tokens: a row ends after so many.
      cache: a policy, its name, a list of one policy a layer, or a ``KVCache`` of an earlier
        result, to which the prompts are appended: as it holds no row's last new token,
        ``result.unfed``, a prompt should begin with that. A cache given is donated: it can't be
        used again, but a ``kvjax.fork`` of it can.
      max_len: tokens a row of the cache can hold. By default what is needed, rounded up to 2**k
        or 3 * 2**k, so that similar lengths share one compiled program; not rounded where that
        would change the frequencies of a length-dependent rotary kind (dynamic, longrope). These
        go by ``max_len`` from the first token on, whereas Transformers goes by the text's length
        so far: beyond the trained length a larger ``max_len`` changes every logit.
      rotary_len: the length that these frequencies go by in place of ``max_len``, whatever room the
        cache has; as of ``init_cache``.
      seed: row ``i`` draws with ``seed + i``; or a list, one a row. The draws of a row depend on
        nothing else: not on the other rows.
      temperature: logits are divided by it; 0 takes the likeliest token.
      top_k, top_p, min_p, typical_p, repetition_penalty, frequency_penalty, presence_penalty,
        no_repeat_ngram_size: see ``kvjax.sampling.params.make_settings``; of a text in a given
        cache they know nothing: the repetition penalty and n-grams go by these prompts and the new
        text, the other two penalties by the new text.
      logit_bias: numbers, by token id, that are added to these tokens' logits.
      min_new_tokens: no end-of-text token before a row has so many new tokens. A stop string counts
        if a later token completes it; these tokens stay, though the text ends before it.
      stop: strings before which a row's text ends.
      eos_token_ids: tokens after which a row ends; by default the checkpoint's, the one thing
        that is taken from its ``generation_config.json``, but for the token that a decoder behind
        an encoder begins with.
      use_cache: False computes the whole text again for each token: the baseline.
      prefill_chunk: prompts are fed in chunks of so many tokens, the last one padded to a power of
        two.
      limits: rows, tokens and bytes that a request may take; one beyond them is a ``ValueError``.
      mesh: devices to spread the model and the cache over, see ``make_mesh``; by default those that
        the model was loaded for. A model that is elsewhere is moved there first: one that is used
        often is better loaded so. Rows that ``data`` does not divide are filled up with empty ones,
        which ``result.cache`` has as well.
      n: continuations of each prompt, rows one behind the other, each with a seed of its own. The
        prompt is computed once, and in a paged cache its full pages are there once.
      best_of: draw so many of each prompt, and give the ``n`` whose tokens have the highest mean
        log-probability by the model's own distribution, the best one first; not of ``stream``.
      num_beams: above 1, search for the likeliest texts with so many beams a prompt, as in
        Transformers, and give the ``n`` best, the best one first (``result.sequence_scores``).
        Penalties, bias and hook are of log-probabilities then. Beams share prompts as samples do.
      length_penalty: a text's score is its log-probability over its length to this power: above 0
        favours longer texts, below 0 shorter ones.
      early_stopping: when a search ends that has found as many texts as beams: True at once, False
        where no beam is better as it is, "never" where none can become better.
      num_beam_groups, diversity_penalty: beams in groups, each of which pays so much for a token
        that a beam of an earlier group has chosen in the same step (Vijayakumar et al., "Diverse
        Beam Search", arXiv:1610.02424), behind the other penalties.
      prefix_cache: a ``PrefixTree``, or ``tree.of(tenant)``: what it has of a prompt is not
        computed again, and what is new stays with it. It has a policy of its own. Threads that
        share one wait for their turn.
      logprobs: tell each new token's log-probability by the model's own distribution, before bias,
        filters and temperature, that by the distribution that it was drawn from, behind them, and
        those of so many of the likeliest tokens, 0 to 20; True is 0 (``result.logprobs``).
      guide: what new texts keep to, a product of ``Guides``, or a list of one for each prompt, None
        where it is free. Each row goes along a copy of its own (``result.guides``), so it can be
        given again. A row that has one ends with it, or at ``max_new_tokens``. Each beam goes
        along a copy of the one that it goes on from.
      padded: give ``result.tokens`` and its log-probabilities as arrays of ``max_new_tokens`` a
        row, and ``result.lengths``.
      logits_hook: ``hook(logits, tokens, length) -> logits``, a pure function of jax.numpy, traced
        once for a program, that changes the logits before everything else: float32[batch, vocab],
        each row's tokens so far, int32[batch, room], of these prompts and the new text, and how
        many they are, int32[batch].
      draft: what proposes tokens that the model checks, several a pass: ``"lookup"``, or
        ``PromptLookup``, for what followed earlier in the text; another model of the same
        tokenizer, or ``DraftModel``. The text is the same, token for token, as without
        (``stats.speculation`` says what it saved), but for near ties: passes over several tokens
        round otherwise in their last bits.

    Raises:
      ValueError: before anything runs, if a prompt is empty or has a token that the model has
        not, prompt and new tokens are more than ``max_len`` or the model's positions, or an
        argument is out of its range.
      CacheOverflowError: if the cache given has overflowed before.
      NonFiniteError: if logits are not finite numbers; nothing is drawn from them.
    """
    return run_generation(*_prepare(lm, prompts, settings))


@explicit_signature(GenerateKeywords)
@without_mesh_context
def stream(
    lm: LanguageModel, prompts: Prompts, **settings: Unpack[GenerateKeywords]
) -> RunningGeneration:
    """Continue prompts, and give text as it comes; arguments and errors as of ``generate``.

    Returns:
      An iterator over pieces. An incomplete character, and what may be the beginning of a stop
      string, is held back, so the pieces of a row, joined, are exactly its text and tokens. After
      the last piece ``.result`` is what ``generate`` would have given. Arguments are checked
      here; ``NonFiniteError`` comes from the iteration, and so does what a ``prefix_cache``
      refuses: it lends its pages when the first piece is asked for.
    """
    return start_generation(*_prepare(lm, prompts, settings), watched=True)


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
    """Read prompts into a cache, as ``generate`` does before its first token.

    Args:
      lm, prompts, cache, max_len, rotary_len, prefill_chunk, mesh: as of ``generate``; without
        ``max_len`` there is room for a token more, rounded up, as far as the model has positions.

    Returns:
      The cache, and the logits behind each prompt, float32[batch, vocab]. Any loop of one's own
      goes on from these; ``kvjax.repeat(cache, n)`` has each prompt ``n`` times.

    Raises:
      ValueError, CacheOverflowError: as ``generate``.
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
        # Room for the token that the caller appends next.
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
    watched: bool,
    chunks: list[PromptChunk] | None = None,
) -> RunningGeneration:
    """A generation that runs as it is iterated over; ``watched``: somebody waits for its text.

    Raises:
      ValueError: if the best of samples is waited for.
    """
    search = request.search
    if search is None:
        return Stream(lm, request, watched=watched, chunks=chunks)
    if search.beams is not None:
        return BeamStream(lm, request, watched=watched, chunks=chunks)
    if watched:
        raise ValueError("best_of can't be streamed: which sample is best shows at the end")
    return BestOf(lm, request, chunks=chunks)


def run_generation(
    lm: LanguageModel, request: GenerationRequest, *, chunks: list[PromptChunk] | None = None
) -> GenerationResult:
    """The result of a generation that is not streamed. Threads that use the same prefix tree run
    one after the other."""
    found, prefixes = (
        start_generation(lm, request, watched=False, chunks=chunks),
        request.prefix_cache,
    )
    with nullcontext() if prefixes is None else prefixes.tree.lease_lock.acquire():
        for _ in found:
            pass
    return found.result
