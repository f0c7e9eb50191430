"""A draft model in an engine: its own rows and pages, and the program that proposes tokens."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from kvjax.core.pytree import pytree_dataclass, tree_bytes
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.core.validation import as_int
from kvjax.engine.drafts import MAX_DRAFT_TOKENS
from kvjax.engine.model_runner import ModelRunner
from kvjax.engine.pool_config import max_pages_per_row, with_window_slack
from kvjax.engine.programs import (
    EngineState,
    VerifyInputs,
    program_context,
    select_rows,
    update_rows,
    written_at,
)
from kvjax.engine.sequence import RunningSequence
from kvjax.generation.drafts.draft_model import Draft, DraftModel
from kvjax.generation.drafts.propose import DraftModelProposer
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.programs import Progress, choose_tokens
from kvjax.layouts import Paged, as_paged
from kvjax.memory.sizes import device_bytes
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import position_limit
from kvjax.policies.presets import per_layer
from kvjax.prefixes.pool_config import PoolConfig, make_pool_config
from kvjax.prefixes.sequences import CachedSequences
from kvjax.sampling.filters import Logits
from kvjax.sampling.history import TokenHistory


@pytree_dataclass
class ProposeInputs:
    """What a draft model proposes for the rows of a ``VerifyInputs``.

    ``count``: int32[n], tokens to propose, 0 for none; ``lengths``: int32[n], tokens of the row
    that the draft model's cache has; ``sampled``: int32[n], new tokens of the row; ``tables``: for
    each of the draft model's cache groups int32[n, columns].
    """

    count: PerRow
    lengths: PerRow
    sampled: PerRow
    tables: tuple[Array, ...]


@functools.partial(jax.jit, static_argnames="proposer", donate_argnames="engine_state")
def propose(
    engine_state: EngineState,
    proposer: DraftModelProposer,
    params: PyTree,
    history: TokenHistory,
    verify: VerifyInputs,
    inputs: ProposeInputs,
) -> tuple[EngineState, tuple[Tokens, PerRow]]:
    """Read the tokens that the draft model's cache lacks, and propose the next ones.

    Args:
      engine_state: of the draft model's rows.
      history: tokens of all rows of the engine.

    Returns:
      The state, whose cache then has all proposed tokens except the last; and ``tokens`` and
      ``count`` of ``verify`` with the proposals.
    """
    before, drafting = select_rows(engine_state, verify.rows), inputs.count > 0
    cache, settings = before.cache, verify.params.sampling
    if len(verify.rows) < engine_state.cache.batch:
        history = jax.tree.map(lambda x: jnp.take(x, verify.rows, axis=0, mode="clip"), history)
    assert history.length is not None
    fresh = drafting & (inputs.lengths == 0)
    cache = replace(cache, written=jnp.where(fresh[:, None], 0, cache.written))
    ends = jnp.where(drafting, history.length + inputs.count - 1, 0)
    lengths = jnp.where(drafting, inputs.lengths, 0)
    context = program_context(cache, lengths, inputs.tables, written=written_at(cache, ends))
    filters = replace(settings.filters, mesh=cache.mesh_sharding is not None)

    def choose(
        progress: Progress, history: TokenHistory, logits: Logits, limit: PerRow
    ) -> tuple[Progress, TokenHistory]:
        chosen: Any = choose_tokens(progress, history, logits, filters, settings, limit)
        return chosen

    newest: Any = verify.tokens[:, 0]
    none_broken = jnp.zeros_like(drafting)
    progress = Progress(newest, inputs.sampled, ~drafting, none_broken)
    (tokens, count), context = proposer.propose(
        params, context, progress, history, inputs.count, choose
    )
    tokens = jnp.where(drafting[:, None], tokens, verify.tokens[:, 1:])
    tokens = jnp.concatenate([verify.tokens[:, :1], tokens], axis=1)
    after = EngineState(context.cache, before.progress, before.history)
    # At least one token is verified, right or wrong: that pass also chooses the model's own token.
    count = jnp.where(drafting, jnp.maximum(count, 1), verify.count)
    return update_rows(engine_state, verify.rows, after), (tokens, count)


class DraftModelRunner:
    """A draft model with as many rows as the engine, in pools that hold all rows at full length.

    ``nbytes``: device memory of its cache, and of parameters that it does not share with the
    model; ``max_rewind``: as in ``ModelRunner``.

    Raises:
      ValueError: if the draft model has fewer positions than ``max_len``; if its policy names the
        pages of its pools, or does not fit pages.
    """

    def __init__(
        self, lm: LanguageModel, draft: DraftModel, count: int, max_len: int, chunk: int
    ) -> None:
        limit = position_limit(draft.lm.config)
        if limit is not None and limit < max_len:
            raise ValueError(
                f"the engine's max_seq_len is {max_len}, but the draft has only {limit} positions"
            )
        self._lm = draft.lm if lm.mesh is None else draft.lm.on(lm.mesh)
        self._chunk, self._vocab, self._count = chunk, lm.config.vocab_size, count
        self._pool_config = config = draft_pool_config(self._lm, draft, count, max_len, chunk)
        shared = {id(x) for x in jax.tree.leaves(lm.params)}
        own = [x for x in jax.tree.leaves(draft.lm.params) if id(x) not in shared]
        self._weight_bytes = tree_bytes(own)
        cache = device_bytes(
            config.model_config, list(config.policies), count, max_len, config.mesh
        )
        self.nbytes = cache + self._weight_bytes

    def allocate(self) -> int:
        """Allocate the cache. Returns ``draft_bytes`` of ``EngineStats``."""
        prefixes = CachedSequences(self._pool_config, (0, 0, None))
        self._runner = ModelRunner(self._lm, self._pool_config, prefixes, self._count, 1, True)
        self.max_rewind, allocated = self._runner.max_rewind, self._runner.allocated
        return self._weight_bytes + allocated["pool_bytes"] + allocated["row_bytes"]

    def propose(
        self,
        verify: VerifyInputs,
        drafting: Sequence[tuple[int, RunningSequence, int]],
        history: TokenHistory,
    ) -> VerifyInputs:
        """``verify`` with proposed tokens; ``drafting``: (place in ``verify``, sequence, number of
        tokens); ``history``: of all rows."""
        count, lengths, sampled = np.zeros((3, len(verify.rows)), np.int32)
        for place, seq, tokens in drafting:
            self._catch_up(seq, tokens)
            count[place], lengths[place], sampled[place] = tokens, seq.draft_length, seq.sampled
            seq.draft_length = seq.length + 1
        numbers: Any = count, lengths, sampled, self._runner.tables_of(verify.rows)
        limit, own_vocab = verify.tokens.shape[1] - 1, self._lm.config.vocab_size
        proposer = DraftModelProposer(limit, None, self._lm.architecture, own_vocab, self._vocab)
        tokens, counts = self._runner.dispatch(
            propose, proposer, self._runner.params, history, verify, ProposeInputs(*numbers)
        )
        return replace(verify, tokens=tokens, count=counts)

    def compile(self) -> int:
        """Run every prefill program once without tokens. Returns how many there are."""
        for width in self._runner.chunk_widths:
            self._runner.append(0, [], 0, width)
        return len(self._runner.chunk_widths)

    def _catch_up(self, seq: RunningSequence, tokens: int) -> None:
        """Give a row the pages of its sequence and ``tokens`` more, and prefill what its cache
        lacks, except for the last tokens, which ``propose`` reads itself."""
        tables, length = self._runner.page_tables, seq.length + 1
        if not seq.draft_length:  # the row may still have pages of another request
            tables.release(seq.row)
        while length - seq.draft_length > MAX_DRAFT_TOKENS + 1:
            start, last_id = seq.draft_length, self._lm.config.vocab_size - 1
            end = min(start + self._chunk, length - 1)
            chunk = [*seq.prompt, *seq.handle.generated][start:end]
            tables.extend(seq.row, end)
            self._runner.append(seq.row, [min(token, last_id) for token in chunk], start)
            seq.draft_length = end
        tables.extend(seq.row, length + tokens - 1)


def draft_runner_of(
    lm: LanguageModel, draft: Draft | None, count: int, max_len: int, chunk: int
) -> DraftModelRunner | None:
    """The runner of an engine's draft model; None for other drafts."""
    if not isinstance(draft, DraftModel):
        return None
    return DraftModelRunner(lm, draft, count, max_len, as_int("prefill_chunk", chunk, 1))


def draft_pool_config(
    lm: LanguageModel, draft: DraftModel, count: int, max_len: int, chunk: int
) -> PoolConfig:
    """The pools of a draft model with ``count`` rows."""
    policies = [_paged(policy) for policy in per_layer(draft.cache, lm.config)]
    layouts = [as_paged(policy.layout) for policy in policies]
    if any(layout is not None and layout.pages is not None for layout in layouts):
        raise ValueError(
            "the draft's policy sets pages, but an engine allocates enough pages for all rows: "
            "leave pages out"
        )
    policies = with_window_slack(policies, max(chunk, MAX_DRAFT_TOKENS + 1) - 1)

    def config(pages: int) -> PoolConfig:
        return make_pool_config(lm, policies, pages, None, max_len, chunk, True, 1)

    return config(count * max_pages_per_row(config(1)))


def _paged(policy: CachePolicy) -> CachePolicy:
    inner = policy.layout
    return policy if as_paged(inner) else replace(policy, layout=Paged(inner=inner))
