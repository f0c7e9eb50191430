"""A generation on the device: creation of the cache, prefill, growth, decoding."""

from collections import Counter
from typing import NamedTuple

import jax
import numpy as np
from jax.stages import Lowered
from jaxtyping import PyTree

from kvjax.cache.checks import check
from kvjax.cache.creation import allocate
from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.core.transfer import commit_like, fetch, put_like_rows
from kvjax.core.typing import Array
from kvjax.generation import programs
from kvjax.generation.drafts.acceptance import Acceptance
from kvjax.generation.drafts.draft_model import Proposer
from kvjax.generation.drafts.speculative import SpeculativeDecoder
from kvjax.generation.encoder import SOURCE, has_encoded
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import grown_capacity, max_capacity
from kvjax.generation.programs import Cached, Context, Progress, Uncached
from kvjax.generation.request import GenerationRequest, PromptChunk
from kvjax.operations.capacity import Move, make_room, settle_in_budget
from kvjax.operations.rows import rewind, rewindable
from kvjax.placement.device import Device
from kvjax.prefixes.lease import Lease
from kvjax.sampling.history import TokenHistory, make_history
from kvjax.sampling.scores import Scores


class DecodeOutput(NamedTuple):
    """The result of one dispatch.

    Attributes:
      tokens: int32[batch, steps], the chosen tokens.
      progress: the progress of each row after the dispatch.
      scores: the scores of the tokens; None without ``logprobs``.
      acceptance: acceptance statistics of drafted tokens; None without a draft.
    """

    tokens: jax.Array
    progress: Progress
    scores: Scores | None
    acceptance: Acceptance | None


class Session:
    """A running generation.

    Call ``start``, then ``prefill`` with each chunk of the prompts, then ``begin``, and then
    ``decode`` repeatedly. If the cache can grow, call ``make_room`` before ``prefill``, ``begin``
    and ``decode``. No method waits for the device, except ``can_rewind`` and ``check``.

    Attributes:
      context: the sequences of all rows.
      logits: float32[batch, vocab], the logits after the prompts.
      cache_bytes: bytes of the cache and the encoder's cache, by placement.
      moves: layers that ``policy("auto")`` has moved.
      prefix_hits: int32[batch], how many tokens of each prompt the prefix tree had cached.
      prefilled: int32[batch], how many tokens of each prompt are in the cache.
    """

    context: Context
    logits: jax.Array

    def __init__(self, lm: LanguageModel, request: GenerationRequest) -> None:
        self._lm, self._request = lm, request
        self._rows = len(request.prompts)  # including rows that fill up a mesh
        self.cache_bytes: Counter[str] = Counter()
        self.moves: list[Move] = []
        self.prefix_hits = self.prefilled = np.zeros(self._rows, np.int32)
        self._lease: Lease | None = None
        self._drafts: SpeculativeDecoder | None = None

    @property
    def lm(self) -> LanguageModel:
        """The model. After ``start`` it includes the encoder's output."""
        return self._lm

    @property
    def max_steps(self) -> int | None:
        """The maximum number of steps per call of ``decode``, if each call waits for the previous
        one; None if calls can be dispatched ahead."""
        return None

    @property
    def cache(self) -> KVCache | None:
        """The cache; None without one."""
        return self.context.cache

    def start(self, context: Context | None = None) -> None:
        """Create the context to which prompts are appended, or use ``context`` if it is given."""
        request, vocab = self._request, self._lm.config.vocab_size
        if request.encoder_tokens is not None:
            self._lm = self._lm.with_encoder_inputs(
                request.encoder_tokens, request.policy or "static"
            )
        context = self._new_context() if context is None else context
        self.context = commit_like(context, self._lm.params)
        self.logits = self.put(np.zeros((self._rows, vocab), np.float32))
        self._limit = self.put(np.int32(request.max_new_tokens))
        if request.draft is not None and self.cache is not None:
            platform = self.cache.layers[0].policy.placement.platform()
            self._drafts = SpeculativeDecoder(self._lm, request, request.draft, platform)

    def put(self, tree: PyTree) -> PyTree:
        """Put scalars and arrays of rows on the devices of the context, and commit them if the
        context is committed. Otherwise every combination would compile a separate program."""
        mesh_sharding = self._request.mesh_sharding
        if mesh_sharding is None:
            context = self.context
            rows = context.length if isinstance(context, Uncached) else context.cache.length
            return put_like_rows(tree, rows)
        return mesh_sharding.put(tree, lambda shape: mesh_sharding.batch_spec(shape, self._rows))

    def prefill(self, chunk: PromptChunk) -> None:
        """Process a chunk of the prompts."""
        self.context, self.logits = programs.prefill(*self._prefill_args(chunk))
        self.prefilled = self.prefilled + chunk.lengths
        if self._lease is not None and self.cache is not None:
            self.context = Cached(self._lease.after_chunk(self.cache, self.prefilled))

    def begin(self) -> DecodeOutput:
        """Choose the first token of each row, from the logits after its prompt."""
        request, past = self._request, self.expand_samples()
        self._progress, self._past, scores = programs.choose_first(
            self.logits, request.filters, self.sampling, self._limit, past, request.logprobs
        )
        del self.logits
        return DecodeOutput(self._progress.token[:, None], self._progress, scores, None)

    def expand_samples(self) -> TokenHistory | None:
        """Repeat the row of every prompt for its samples. Returns the token history that sampling
        needs, or None."""
        request = self._request
        if request.samples > 1:
            self.context, self.logits = programs.repeat_rows(
                self.context, self.logits, request.samples
            )
            self._rows *= request.samples
            if self.cache is not None:
                self._set_cache(self.cache, [])
        self.sampling = self.put(request.sampling)
        if self._drafts is not None:
            self._drafts.prefill()
            self._drafts.acceptance = self.put(self._drafts.acceptance)
            self.cache_bytes.update(self._drafts.nbytes)
        past = make_history(
            request.row_sequences,
            vocab=self.logits.shape[1],
            width=request.history_len,
            seen=request.filters.needs_seen,
            tokens=request.filters.needs_tokens or self._drafts is not None,
        )
        return None if past is None else self.put(past)

    def decode(self, steps: np.int32 | Array, halt: np.ndarray | Array) -> DecodeOutput:
        """Choose ``steps`` more tokens per row, at most ``programs.MAX_STEPS``. Rows where ``halt``
        (bool[batch]) is true end now."""
        call, proposer = self._decode_args(steps, halt), self.proposer
        if proposer is None or self._drafts is None:
            results = programs.decode(*call)
        else:
            results = self._drafts.decode(proposer, call)
        self.context, self._progress, self._past, tokens, scores = results
        acceptance = None if self._drafts is None else self._drafts.acceptance
        return DecodeOutput(tokens, self._progress, scores, acceptance)

    @property
    def proposer(self) -> Proposer | None:
        """The draft proposer for the current cache; None if nothing is drafted."""
        drafts, cache = self._drafts, self.cache
        return None if drafts is None or cache is None else drafts.proposer(cache, drafts.context)

    def reach(self, tokens: int) -> int:
        """Return an upper bound of the distance between tokens that attention sees in a sequence of
        ``tokens`` tokens."""
        cache = self.cache
        if cache is None:
            return tokens
        return min(tokens, cache.reach, max(x.policy.layout.reach for x in cache.layers))

    def make_room(self, tokens: int) -> None:
        """Grow the cache so that ``tokens`` tokens per row fit, if it can grow."""
        cache = self.cache
        if cache is None or cache.grows_to is None or tokens <= cache.max_len:
            return
        self._set_cache(*make_room(cache, grown_capacity(cache, tokens)))

    def can_rewind(self, tokens: np.ndarray) -> bool:
        """Return whether the newest ``tokens`` tokens of each row can be removed from the cache."""
        return self.cache is None or bool(np.all(tokens <= fetch(rewindable(self.cache))))

    def rewind(self, tokens: int | np.ndarray) -> None:
        """Remove the newest ``tokens`` tokens of each row from the cache. ``tokens`` is one number,
        or one per row."""
        if self.cache is not None:
            self.context = Cached(rewind(self.cache, tokens))

    def close(self, texts: list[list[int]] | None) -> None:
        """Return leased pages to the prefix tree. The tree caches the tokens of each row,
        ``texts``. With None, nothing is cached."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.finish(self.cache, texts)

    def check(self) -> None:
        """Call ``kvjax.check`` on the cache."""
        if self.cache is not None:
            check(self.cache)

    def lower_prefill(self, chunks: list[PromptChunk]) -> list[Lowered]:
        """Lower the programs that prefill these chunks. Later calls with the same types of
        arguments use the compiled programs."""
        return [programs.prefill.lower(*self._prefill_args(chunk)) for chunk in chunks]

    def lower_steps(self) -> dict[str, Lowered]:
        """Lower the programs of ``decode``, by name."""
        call, proposer = self._decode_args(np.int32(0), np.zeros(self._rows, bool)), self.proposer
        if proposer is None or self._drafts is None:
            return {"decode": programs.decode.lower(*call)}
        self._drafts.acceptance = self.put(self._drafts.acceptance)
        return {"decode": self._drafts.lowered(proposer, call)}

    def zeros_like(self, shapes: PyTree) -> PyTree:
        """Create arrays of zeros with the given shapes, on the same devices as the results of a
        program."""
        return self.put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))

    def lower_draft_prefill(self, chunks: list[PromptChunk]) -> list[Lowered]:
        """Lower the draft model's prefill of these chunks, if there is a draft model."""
        return [] if self._drafts is None else self._drafts.lowered_prefill(chunks)

    def _prefill_args(self, chunk: PromptChunk) -> tuple[object, ...]:
        lm, arrays = self._lm, (chunk.tokens, chunk.lengths, chunk.ends)
        return lm.architecture, lm.params, self.context, self.logits, *arrays

    def _decode_args(self, steps: np.int32 | Array, halt: np.ndarray | Array) -> tuple[object, ...]:
        lm = self._lm
        return (
            lm.architecture,
            self._request.filters,
            lm.params,
            self.context,
            self._progress,
            self._past,
            halt,
            self.sampling,
            self._limit,
            steps,
            self._request.logprobs,
        )

    def _new_context(self) -> Context:
        request, rows = self._request, self._rows
        if request.cache is not None:
            self._set_cache(
                *settle_in_budget(request.cache, grown_capacity(request.cache, request.positions))
            )
        elif request.prefix_cache is not None:
            tree, name = request.prefix_cache.tree, request.prefix_cache.name
            lease = self._lease = tree.lease(
                self._lm,
                request.prompts,
                new=request.max_new_tokens,
                samples=request.samples,
                tenant=name,
            )
            self.prefix_hits = self.prefilled = lease.hits
            self._set_cache(lease.take_cache(), [])
        elif request.policy is not None:
            cache = allocate(
                self._lm.config,
                request.policy,
                batch=rows,
                max_len=request.max_len,
                initial_len=request.capacity,
                mesh=self._lm.mesh,
                rotary_len=request.rotary_len,
            )
            capacity = max_capacity(cache)
            if request.positions > capacity:
                limit = f"the policy's cache holds {capacity}"
                limit = cache.last_position if capacity == cache.positions else limit
                raise ValueError(
                    f"prompt and max_new_tokens need {request.positions} positions, but {limit}"
                )
            self._set_cache(cache, [])
        else:
            empty = np.zeros((rows, request.capacity), np.int32), np.zeros(rows, np.int32)
            tokens, length = Device(mesh_sharding=request.mesh_sharding).put(empty)
            return Uncached(tokens, length, request.rotary_len)
        return self.context

    def _set_cache(self, cache: KVCache, moves: list[Move]) -> None:
        self.context = Cached(cache)
        self.cache_bytes = Counter(nbytes(cache))
        if self._drafts is not None:
            self.cache_bytes.update(self._drafts.nbytes)
        if has_encoded(self._lm):
            self.cache_bytes.update(nbytes(self._lm.params[SOURCE]))
        self.moves += moves
