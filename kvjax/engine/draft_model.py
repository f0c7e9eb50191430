"""The rows of a draft's model, beside those of an engine: what each has read of its text."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.pytree import pytree_dataclass, tree_bytes
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.core.validation import as_int
from kvjax.engine.drafts import MAX_DRAFT_TOKENS
from kvjax.engine.model_runner import ModelRunner
from kvjax.engine.pool_config import with_slack
from kvjax.engine.programs import (
    EngineState,
    VerifyInputs,
    context_of,
    some_of,
    with_some,
    written_to,
)
from kvjax.engine.sequence import RunningSequence
from kvjax.generation.drafts.draft_model import Draft, DraftModel
from kvjax.generation.drafts.propose import DraftModelProposer
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.programs import Progress, choose_tokens
from kvjax.layouts import Paged, paged
from kvjax.memory.sizes import device_bytes
from kvjax.policies.model_config import position_limit
from kvjax.policies.presets import per_layer
from kvjax.prefixes.pool_config import PoolConfig, make_pool_config
from kvjax.prefixes.sequences import CachedSequences
from kvjax.sampling.filters import Logits
from kvjax.sampling.history import TokenHistory


@pytree_dataclass
class ProposeInputs:
    """What the rows of a ``VerifyInputs`` want of the draft's model.

    ``count``: int32[n], tokens of each, 0 for none; ``known``: int32[n], those of its text that the
    draft's cache holds; ``begun``: int32[n], new tokens that it has; ``tables``: of the draft's
    kinds of layers, int32[n, columns].
    """

    count: PerRow
    known: PerRow
    begun: PerRow
    tables: tuple[Array, ...]


@functools.partial(jax.jit, static_argnames="proposer", donate_argnames="held")
def propose(
    held: EngineState,
    proposer: DraftModelProposer,
    params: Any,
    past: TokenHistory,
    drafted: VerifyInputs,
    wanted: ProposeInputs,
) -> tuple[EngineState, tuple[Tokens, PerRow]]:
    """The tokens and counts of ``drafted``, with what the draft's model would write.

    ``held``: of its own rows; ``past``: the texts of all of the engine's rows, whole where they
    want something. What the draft reads of these is then in its cache, and what it proposes, but
    for the newest.
    """
    before, some = some_of(held, drafted.rows), wanted.count > 0
    cache, settings = before.cache, drafted.asked.sampling
    if len(drafted.rows) < held.cache.batch:
        past = jax.tree.map(lambda x: jnp.take(x, drafted.rows, axis=0, mode="clip"), past)
    assert past.length is not None
    fresh = some & (wanted.known == 0)
    cache = replace(cache, written=jnp.where(fresh[:, None], 0, cache.written))
    ends = jnp.where(some, past.length + wanted.count - 1, 0)
    lengths = jnp.where(some, wanted.known, 0)
    context = context_of(cache, lengths, wanted.tables, written=written_to(cache, ends))
    filters = replace(settings.filters, mesh=cache.spread is not None)

    def one(
        progress: Progress, past: TokenHistory, logits: Logits, limit: PerRow
    ) -> tuple[Progress, TokenHistory]:
        found: Any = choose_tokens(progress, past, logits, filters, settings, limit)
        return found

    newest: Any = drafted.tokens[:, 0]
    progress = Progress(newest, wanted.begun, ~some, some & ~some)
    (tokens, count), context = proposer.propose(params, context, progress, past, wanted.count, one)
    tokens = jnp.where(some[:, None], tokens, drafted.tokens[:, 1:])
    tokens = jnp.concatenate([drafted.tokens[:, :1], tokens], axis=1)
    after = EngineState(context.cache, before.progress, before.past)
    # One at least, whatever it is: a row's own token is chosen by the check.
    found = tokens, jnp.where(some, jnp.maximum(count, 1), drafted.count)
    return with_some(held, drafted.rows, after), found


class DraftModelRunner:
    """So many rows of a draft's model, in pages of their own, as many as they can need.

    ``max_len``: tokens of a text; ``chunk``: of those that it reads together. ``nbytes``: that the
    draft takes of the device, its cache, and parameters that are not the model's; ``max_rewind``:
    as of ``ModelRunner``.

    Raises:
      ValueError: if the draft has too few positions; as of ``PrefixTree``, of its policy.
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
        self._chunk, self._vocab = chunk, lm.config.vocab_size
        pool_config = _pool_config(self._lm, draft, count, max_len, chunk)
        ours = {id(x) for x in jax.tree.leaves(lm.params)}
        own = [x for x in jax.tree.leaves(draft.lm.params) if id(x) not in ours]
        cache = device_bytes(
            pool_config.model_config, list(pool_config.policies), count, max_len, pool_config.mesh
        )
        self.own_weights = tree_bytes(own)
        self.nbytes = cache + self.own_weights
        self._pool_config, self._count = pool_config, count

    def allocate(self) -> int:
        """Make the cache; bytes of all that the draft has."""
        texts = CachedSequences(self._pool_config, (0, 0, None))
        self._runner = ModelRunner(self._lm, self._pool_config, texts, self._count, 1, True)
        self.max_rewind, found = self._runner.max_rewind, self._runner.allocated
        return self.own_weights + found["pool_bytes"] + found["row_bytes"]

    def propose(
        self,
        drafted: VerifyInputs,
        some: Sequence[tuple[int, RunningSequence, int]],
        past: TokenHistory,
    ) -> VerifyInputs:
        """With so many proposed tokens of some rows, each at its place in the arrays; ``past``: the
        texts of all."""
        size = len(drafted.rows)
        count, known, begun = np.zeros((3, size), np.int32)
        for at, seq, more in some:
            self._read(seq, more)
            count[at], known[at], begun[at] = more, seq.read, seq.count
            seq.read = seq.filled + 1
        numbers: Any = count, known, begun, self._runner.tables(drafted.rows)
        wanted = ProposeInputs(*numbers)
        most, own = drafted.tokens.shape[1] - 1, self._lm.config.vocab_size
        proposer = DraftModelProposer(most, None, self._lm.architecture, own, self._vocab)
        found = self._runner.run(propose, proposer, self._runner.params, past, drafted, wanted)
        return replace(drafted, tokens=found[0], count=found[1])

    def compile(self) -> int:
        """Run every program that reads once, without tokens; how many there are."""
        for width in self._runner.widths:
            self._runner.read(0, [], 0, width)
        return len(self._runner.widths)

    def _read(self, seq: RunningSequence, more: int) -> None:
        """Let a row have the pages of its text and so many tokens more, and read what is missing of
        it, but for what is read with what is proposed."""
        pages, length = self._runner.page_tables, seq.filled + 1
        if not seq.read:  # another's was there
            pages.release(seq.row)
        while length - seq.read > MAX_DRAFT_TOKENS + 1:
            end, last = min(seq.read + self._chunk, length - 1), self._lm.config.vocab_size - 1
            text = [*seq.prompt, *seq.handle.drawn][seq.read : end]
            pages.extend(seq.row, end)
            self._runner.read(seq.row, [min(token, last) for token in text], seq.read)
            seq.read = end
        pages.extend(seq.row, length + more - 1)


def draft_runner_of(
    lm: LanguageModel, draft: Draft | None, count: int, max_len: int, chunk: Any
) -> DraftModelRunner | None:
    """The rows of a draft, where it has a model; see ``DraftModelRunner``."""
    if not isinstance(draft, DraftModel):
        return None
    return DraftModelRunner(lm, draft, count, max_len, as_int("prefill_chunk", chunk, 1))


def _pool_config(
    lm: LanguageModel, draft: DraftModel, count: int, max_len: int, chunk: int
) -> PoolConfig:
    policies = [_in_pages(each) for each in per_layer(draft.cache, lm.config)]
    if any((layout := paged(each.layout)) and layout.pages is not None for each in policies):
        raise ValueError(
            "the policy of a draft names the pages of its pools: in an engine these are as many as "
            "its rows can need"
        )
    policies = with_slack(policies, max(chunk, MAX_DRAFT_TOKENS + 1) - 1)

    def pool_config(pages: int) -> PoolConfig:
        return make_pool_config(lm, policies, pages, None, max_len, chunk, True, 1)

    return pool_config(
        count * max(kind.page_group.layout.columns for kind in pool_config(1).groups)
    )


def _in_pages(policy: Any) -> Any:
    inner = policy.layout
    return policy if paged(inner) else replace(policy, layout=Paged(inner=inner))
