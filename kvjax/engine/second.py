"""The rows of a draft's model, beside those of an engine: what each has read of its text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from kvjax.core.checks import whole_number
from kvjax.core.trees import tree_bytes
from kvjax.engine.checking import Drafted
from kvjax.engine.drafts import CHECKED
from kvjax.engine.proposing import Wanted, propose
from kvjax.engine.rows import Rows
from kvjax.engine.slots import Slot
from kvjax.engine.terms import with_slack
from kvjax.generation.drafts.asked import Draft, DraftModel
from kvjax.generation.drafts.proposals import Second
from kvjax.generation.loaded_model import LanguageModel
from kvjax.layouts import Paged, paged
from kvjax.memory.sizes import device_bytes
from kvjax.policies.positions import position_limit
from kvjax.policies.presets import per_layer
from kvjax.prefixes.terms import Terms, terms_for
from kvjax.prefixes.texts import Texts
from kvjax.sampling.history import Past


class SecondRows:
    """So many rows of a draft's model, in pages of their own, as many as they can need.

    ``max_len``: tokens of a text; ``chunk``: of those that it reads together. ``nbytes``: that the
    draft takes of the device, its cache, and parameters that are not the model's; ``revocable``:
    as of ``Rows``.

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
        terms = _terms(self._lm, draft, count, max_len, chunk)
        ours = {id(x) for x in jax.tree.leaves(lm.params)}
        own = [x for x in jax.tree.leaves(draft.lm.params) if id(x) not in ours]
        cache = device_bytes(terms.config, list(terms.policies), count, max_len, terms.mesh)
        self.own_weights = tree_bytes(own)
        self.nbytes = cache + self.own_weights
        self._terms, self._count = terms, count

    def allocate(self) -> int:
        """Make the cache; bytes of all that the draft has."""
        texts = Texts(self._terms, (0, 0, None))
        self._rows = Rows(self._lm, self._terms, texts, self._count, 1, True)
        self.revocable, found = self._rows.revocable, self._rows.allocated
        return self.own_weights + found["pool_bytes"] + found["row_bytes"]

    def propose(
        self, drafted: Drafted, some: Sequence[tuple[int, Slot, int]], past: Past
    ) -> Drafted:
        """With so many proposed tokens of some rows, each at its place in the arrays; ``past``: the
        texts of all."""
        size = len(drafted.rows)
        count, known, begun = np.zeros((3, size), np.int32)
        for at, slot, more in some:
            self._read(slot, more)
            count[at], known[at], begun[at] = more, slot.read, slot.count
            slot.read = slot.filled + 1
        numbers: Any = count, known, begun, self._rows.tables(drafted.rows)
        wanted = Wanted(*numbers)
        most, own = drafted.tokens.shape[1] - 1, self._lm.config.vocab_size
        drafter = Second(most, None, self._lm.architecture, own, self._vocab)
        found = self._rows.run(propose, drafter, self._rows.params, past, drafted, wanted)
        return replace(drafted, tokens=found[0], count=found[1])

    def compile(self) -> int:
        """Run every program that reads once, without tokens; how many there are."""
        for width in self._rows.widths:
            self._rows.read(0, [], 0, width)
        return len(self._rows.widths)

    def _read(self, slot: Slot, more: int) -> None:
        """Let a row have the pages of its text and so many tokens more, and read what is missing of
        it, but for what is read with what is proposed."""
        pages, length = self._rows.pages, slot.filled + 1
        if not slot.read:  # another's was there
            pages.release(slot.row)
        while length - slot.read > CHECKED + 1:
            end, last = min(slot.read + self._chunk, length - 1), self._lm.config.vocab_size - 1
            text = [*slot.prompt, *slot.handle.drawn][slot.read : end]
            pages.extend(slot.row, end)
            self._rows.read(slot.row, [min(token, last) for token in text], slot.read)
            slot.read = end
        pages.extend(slot.row, length + more - 1)


def second_of(
    lm: LanguageModel, draft: Draft | None, count: int, max_len: int, chunk: Any
) -> SecondRows | None:
    """The rows of a draft, where it has a model; see ``SecondRows``."""
    if not isinstance(draft, DraftModel):
        return None
    return SecondRows(lm, draft, count, max_len, whole_number("prefill_chunk", chunk, 1))


def _terms(lm: LanguageModel, draft: DraftModel, count: int, max_len: int, chunk: int) -> Terms:
    policies = [_in_pages(each) for each in per_layer(draft.cache, lm.config)]
    if any((layout := paged(each.layout)) and layout.pages is not None for each in policies):
        raise ValueError(
            "the policy of a draft names the pages of its pools: in an engine these are as many as "
            "its rows can need"
        )
    policies = with_slack(policies, max(chunk, CHECKED + 1) - 1)

    def terms(pages: int) -> Terms:
        return terms_for(lm, policies, pages, None, max_len, chunk, True, 1)

    return terms(count * max(kind.paging.layout.columns for kind in terms(1).kinds))


def _in_pages(policy: Any) -> Any:
    inner = policy.layout
    return policy if paged(inner) else replace(policy, layout=Paged(inner=inner))
