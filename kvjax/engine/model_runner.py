"""The cache of an engine on the device, and the dispatch of programs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from kvjax.cache.creation import allocate
from kvjax.core.pytree import tree_bytes
from kvjax.core.transfer import commit
from kvjax.core.typing import Counts
from kvjax.engine import programs
from kvjax.engine.beams import BranchInputs, branch
from kvjax.engine.programs import DecodeInputs, EngineState, PrefillInputs, ProgramOutput
from kvjax.engine.rows import PageTables, RunningSequence, SamplingState
from kvjax.generation.guides.masks import mask_words
from kvjax.generation.loaded_model import LanguageModel, check_params_match, without_weak_types
from kvjax.generation.programs import Progress
from kvjax.prefixes.checkpoints import row_arrays
from kvjax.prefixes.pool_config import PoolConfig
from kvjax.prefixes.sequences import CachedSequences
from kvjax.sampling.filters import ALL_ALLOWED
from kvjax.sampling.history import TokenHistory, make_history

MIN_CHUNK_WIDTH = 16
"""The minimum width to which prompt chunks are padded."""
MAX_CHUNK_WIDTHS = 5
"""The maximum number of chunk widths. Each is half the next larger one, and a separate program."""
MAX_BATCH_SIZES = 3
"""The maximum number of batch sizes for decoding. Each is half the next larger one, and a separate
program. An exact engine has a single size, because a different size may sum in a different
order."""


class ModelRunner:
    """Owns the cache of ``count`` rows, whose pages are in the pools of ``prefixes``.

    Attributes:
      params: the parameters with which programs run.
      chunk_widths: widths of prompt chunks, ascending.
      batch_sizes: numbers of rows that decode together, ascending.
      max_rounds: maximum number of decode rounds in one dispatch.
      exact: whether a row's results are bitwise independent of the other rows.
      max_rewind: the number of newest tokens that a row can remove; None for all.
      allocated: the fields ``weight_bytes``, ``pool_bytes`` and ``row_bytes`` of ``EngineStats``.
    """

    def __init__(
        self,
        lm: LanguageModel,
        pool_config: PoolConfig,
        prefixes: CachedSequences,
        count: int,
        max_rounds: int,
        exact: bool,
    ) -> None:
        self.lm, self.pool_config, self.prefixes, self.count = lm, pool_config, prefixes, count
        self.params, self.max_rounds, self.exact = prepare_params(lm.params), max_rounds, exact
        self.chunk_widths = [pool_config.prefill_chunk]
        widths = self.chunk_widths
        while (half := widths[0] // 2) >= MIN_CHUNK_WIDTH and len(widths) < MAX_CHUNK_WIDTHS:
            widths.insert(0, half)
        self.batch_sizes = [count]
        while not exact and self.batch_sizes[0] > 1 and len(self.batch_sizes) < MAX_BATCH_SIZES:
            self.batch_sizes.insert(0, -(-self.batch_sizes[0] // 2))
        # All arguments of programs are committed. Otherwise a trainer's parameters, which are
        # committed, would make JAX compile every program again.
        cache = allocate(
            lm.config,
            list(pool_config.policies),
            batch=count,
            max_len=pool_config.max_len,
            mesh=lm.mesh,
            rotary_len=pool_config.rotary_len,
        )
        cache = commit(cache)
        placement = cache.layers[0].policy.placement
        self.max_rewind, self.platform = cache.max_rewind, placement.platform()
        zeros = np.zeros(count, np.int32)
        progress: Any = zeros, zeros, zeros == 0, zeros > 0
        rows = commit(placement.put((Progress(*progress), self._empty_history(count))))
        self._state = EngineState(replace(cache, pools=()), *rows)
        prefixes.pool.adopt(cache.layers)
        self.page_tables = PageTables(prefixes, count)
        self.sampling_state = SamplingState(count, placement)
        pool_bytes = prefixes.pool.nbytes
        row_bytes = tree_bytes(self._state) + tree_bytes(self.sampling_state.all_rows())
        self.allocated: dict[str, Any] = {
            "weight_bytes": tree_bytes(self.params),
            "pool_bytes": pool_bytes,
            "row_bytes": row_bytes - pool_bytes,
        }

    @property
    def history(self) -> TokenHistory:
        """The tokens of the rows whose sampling or draft needs them."""
        return self._state.history

    def chunk_width(self, tokens: int) -> int:
        """Return the width to which a chunk of ``tokens`` tokens is padded."""
        return next(width for width in self.chunk_widths if width >= tokens)

    def prefill(self, seq: RunningSequence, length: int) -> ProgramOutput:
        """Dispatch the prefill of the next ``length`` tokens of a prompt. The row must already have
        their pages."""
        start, end = seq.length, seq.length + length
        last = end == len(seq.prompt)
        mask = seq.handle.token_mask(mask_words(self.lm.config)) if last else None
        next_tokens = None
        if seq.handle.request.prompt_logprobs is not None:
            next_tokens = seq.prompt[start + 1 : end + 1]
        return self._prefill(
            seq.row,
            seq.prompt[start:end],
            start,
            seq.fresh,
            forced=seq.forced(1)[0],
            last=last,
            mask=mask,
            next_tokens=next_tokens,
        )

    def append(self, row: int, tokens: Sequence[int], start: int, min_width: int = 1) -> None:
        """Dispatch the prefill of tokens after the ``start`` tokens of a row, without choosing a
        new token. The row must already have their pages."""
        fresh = start == 0 and len(tokens) > 0
        self._prefill(row, tokens, start, fresh, min_width=min_width)

    def _prefill(
        self,
        row: int,
        tokens: Sequence[int],
        start: int,
        fresh: bool,
        *,
        forced: int = -1,
        last: bool = False,
        mask: np.ndarray | None = None,
        min_width: int = 1,
        next_tokens: Sequence[int] | None = None,
    ) -> ProgramOutput:
        rows, count, allowed = np.array([row], np.int32), len(tokens), self.full_masks(1)
        padded = np.zeros((1, self.chunk_width(max(count, min_width))), np.int32)
        padded[0, :count] = tokens
        if mask is not None:
            allowed[0] = mask
        arrays = {
            "rows": rows,
            "tokens": padded,
            "lengths": np.array([count], np.int32),
            "starts": np.array([start], np.int32),
            "tables": self.tables_of(rows),
            "fresh": np.array([fresh]),
            "ends": np.array([last]),
            "forced": np.array([forced], np.int32),
            "allowed": allowed,
            "params": self.sampling_state.copy(rows),
        }
        padded_next: np.ndarray | None = None
        if next_tokens is not None:
            padded_next = np.zeros_like(padded)
            padded_next[0, : len(next_tokens)] = next_tokens
        inputs = PrefillInputs(**arrays)
        output: ProgramOutput = self.dispatch(
            programs.prefill, self.lm.architecture, self.params, inputs, padded_next
        )
        return output

    def decode(
        self, decoding: Sequence[tuple[RunningSequence, int]], min_rows: int = 0
    ) -> tuple[ProgramOutput, list[int]]:
        """Dispatch rounds of decoding. The rows must already have the pages.

        Args:
          decoding: sequences, each with its number of rounds.
          min_rows: minimum batch size.

        Returns:
          The output, and the index in it of each of the sequences' rows.
        """
        entries = [(seq, rounds, *entry) for seq, rounds in decoding for entry in seq.entries]
        size = next(n for n in self.batch_sizes if n >= max(len(entries), min_rows))
        rows, places = self.select([row for _, _, row, _ in entries], size)
        lengths = np.zeros(size, np.int32)
        rounds_of = np.zeros(size, np.int32)
        forced = np.full((size, self.max_rounds), -1, np.int32)
        allowed = self.full_masks(size)
        for place, (seq, rounds, _, beam) in zip(places, entries, strict=True):
            lengths[place], rounds_of[place] = seq.length, rounds
            forced[place, :rounds] = seq.forced(rounds)
            if forced[place, 0] < 0:
                mask = seq.handle.token_mask(allowed.shape[1], beam)
                if mask is not None:
                    allowed[place] = mask
        tables, params = self.tables_of(rows), self.sampling_state.for_rows(rows)
        arrays: Any = rows, lengths, rounds_of, tables, forced, allowed, params
        inputs = DecodeInputs(*arrays)
        output = self.dispatch(
            programs.decode, self.lm.architecture, self.params, inputs, exact=self.exact
        )
        return output, places

    def select(self, rows: list[int], size: int) -> tuple[np.ndarray, list[int]]:
        """Make the row numbers for a program of ``size`` rows, int32[size]. Entries that are not
        used have a number that is not a row. Also returns the index of each of ``rows`` in the
        array."""
        places = rows if size == self.count else list(range(len(rows)))
        numbers = np.arange(size, dtype=np.int32)
        if size < self.count:
            numbers[:] = self.count
            numbers[places] = rows
        return numbers, places

    def tables_of(self, rows: Counts) -> tuple[np.ndarray, ...]:
        """Copy the page tables of ``rows``. The copies do not change before the program reads
        them."""
        rows = np.minimum(rows, self.count - 1)
        return tuple(table[rows].copy() for table in self.page_tables.tables)

    def full_masks(self, rows: int) -> np.ndarray:
        """Return token masks that allow all tokens, uint32[rows, words]."""
        return np.full((rows, mask_words(self.lm.config)), ALL_ALLOWED, np.uint32)

    def save_row(self, row: int, tokens: int) -> PyTree:
        """Copy the state of a row with ``tokens`` tokens, except for its full pages; see
        ``programs.save_row``."""
        pages = self.page_tables.partial_pages(row, tokens)
        parts = [
            (group, page)
            for group, page in zip(self.pool_config.groups, pages, strict=True)
            if group.page_group.split is not None
        ]
        return programs.save_row(
            self._state_with_pages(),
            np.int32(row),
            [np.array([page], np.int32) for _, page in parts],
            groups=tuple(group.layers for group, _ in parts),
        )

    def restore_row(self, row: int, layers: PyTree, progress: PyTree) -> None:
        """Restore the state of a row from the result of ``save_row``."""
        self.dispatch(programs.restore_row, np.int32(row), layers, progress)

    def restore_checkpoint(
        self, row: int, arrays: Sequence[np.ndarray], fresh: Sequence[int]
    ) -> None:
        """Restore the state of a row from a checkpoint of the prefix cache. ``fresh`` has the row's
        partly full page in each cache group, or -1 if all pages are full."""
        cache = self._state.cache
        like = [row_arrays(layer) for layer in cache.layers], cache.written
        leaves, treedef = jax.tree.flatten(like)
        layers = jax.tree.unflatten(treedef, [np.asarray(x) for x in arrays[: len(leaves)]])
        at = len(leaves)
        for number, group in enumerate(self.pool_config.groups):
            if group.page_group.split is None:
                continue
            count = len(jax.tree.leaves([self.prefixes.pool.bodies[n] for n in group.layers]))
            if fresh[number] >= 0:
                part = [np.asarray(x) for x in arrays[at : at + count]]
                self.prefixes.pool.write(number, [fresh[number]], [part])
            at += count
        zero: Any = np.int32(0), np.int32(0), np.bool_(False), np.bool_(False)
        history = jax.tree.map(lambda x: x[0], self._empty_history(1))
        self.restore_row(row, layers, (Progress(*zero), history))

    def branch(
        self,
        pairs: Sequence[tuple[int, int]],
        copies: Sequence[Sequence[tuple[int, int]]],
        newest: Sequence[tuple[int, int]],
    ) -> None:
        """Let target rows continue from source rows, and set the newest tokens of some rows.

        Args:
          pairs: (source, target) pairs of rows.
          copies: for each pair, the (source, target) pages to copy in each cache group.
          newest: (row, token) pairs.
        """
        groups = self.pool_config.groups
        pages = [[copy[number] for copy in copies] for number in range(len(groups))]
        inputs = BranchInputs.build(self.count, pairs, pages, newest)
        self.dispatch(branch, inputs, groups=tuple(group.layers for group in groups))

    def set_history(self, row: int, tokens: Sequence[int]) -> None:
        """Set the token history of a row, which penalties and draft models use."""
        padded = np.full(self.pool_config.max_len, self.lm.config.vocab_size, np.int32)
        padded[: len(tokens)] = tokens
        self.dispatch(programs.set_history, np.int32(row), padded, np.int32(len(tokens)))

    def compile(self) -> int:
        """Run every program once without tokens. This is safe while rows are in use. Returns how
        many of the programs run the model."""
        (layers, _), progress = jax.device_get(self.save_row(0, 0))
        for width in self.chunk_widths:
            self.append(0, [], 0, width)
        for size in self.batch_sizes:
            self.decode([], size)
        self.set_history(0, [])
        self.branch([], [], [])
        self.restore_row(0, layers, progress)
        for number in range(len(self.pool_config.groups)):
            self.prefixes.pool.warm_up(number)
        jax.block_until_ready(self._state_with_pages())
        return len(self.chunk_widths) + len(self.batch_sizes)

    def dispatch(self, program: Callable[..., PyTree], *args: PyTree, **static: object) -> PyTree:
        """Call a program that takes and returns the donated ``EngineState``. Returns its other
        results."""
        self._state, output = program(self._state_with_pages(), *args, **static)
        self.prefixes.pool.adopt(self._state.cache.layers)
        return output

    def _state_with_pages(self) -> EngineState:
        """Return the state with the current arrays of the pools, which other code updates too."""
        cache = self._state.cache
        layers = [
            layer if body is None else replace(layer, keys=body[0], values=body[1])
            for layer, body in zip(cache.layers, self.prefixes.pool.bodies, strict=True)
        ]
        return replace(self._state, cache=replace(cache, layers=tuple(layers)))

    def _empty_history(self, rows: int) -> TokenHistory | None:
        return make_history(
            [[]] * rows,
            vocab=self.lm.config.vocab_size,
            width=self.pool_config.max_len,
            seen=True,
            tokens=True,
        )


def prepare_params(params: PyTree) -> PyTree:
    """Convert parameters to committed JAX arrays without weak types."""
    arrays = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.device_put(x), params)
    return commit(without_weak_types(arrays))


def replacement_params(params: PyTree, current: PyTree) -> PyTree:
    """Check that ``params`` can replace the parameters ``current``, and return them as
    ``prepare_params`` converts them.

    Raises:
      ValueError: if shapes, dtypes or devices differ.
    """
    try:
        check_params_match(params, current)
    except ValueError as error:
        raise ValueError(f"the parameters are not those of the engine's model: {error}") from None
    params = prepare_params(params)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(current), strict=True)
    if any(new.sharding != old.sharding for new, old in pairs):
        raise ValueError(
            "the parameters are not those of the engine's model: they are on other devices, or "
            "sharded otherwise; lm.put(params) moves them"
        )
    return params
