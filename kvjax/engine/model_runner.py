"""The rows of an engine: what the device has of them, and what it is sent."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from kvjax.cache.creation import allocate
from kvjax.core.pytree import tree_bytes
from kvjax.core.transfer import commit
from kvjax.engine import programs
from kvjax.engine.beams import branch, branch_inputs
from kvjax.engine.page_tables import PageTables
from kvjax.engine.programs import DecodeInputs, EngineState, PrefillInputs, ProgramOutput
from kvjax.engine.sampling_state import SamplingState
from kvjax.engine.sequence import RunningSequence
from kvjax.generation.guides.masks import mask_words
from kvjax.generation.loaded_model import LanguageModel, check_params_match, without_weak_types
from kvjax.generation.programs import Progress
from kvjax.prefixes.checkpoints import row_arrays
from kvjax.prefixes.pool_config import PoolConfig
from kvjax.prefixes.sequences import CachedSequences
from kvjax.sampling.filters import ALL_ALLOWED
from kvjax.sampling.history import make_history

LEAST_WIDTH = 16
"""Tokens of the narrowest chunk of a prompt, at least."""
WIDTHS = 5
"""Widths of chunks, at most, each half the next: each is a program of its own."""
SIZES = 3
"""Numbers of rows that decode together, at most, each half the next: likewise. Where rows must not
depend on the others there is one, for another number may be multiplied in another order."""


class ModelRunner:
    """So many rows, whose pages are those of ``texts``.

    ``lm``: the model; ``params``: its parameters, as they are sent; ``widths``: of chunks of
    prompts, and ``sizes``, numbers of rows that decode together, rising; ``rounds``: of decoding
    that can be sent at once; ``exact``: no row's numbers depend on the others; ``max_rewind``: how
    many of its newest tokens a row can forget, None for all; ``platform``: that they are on.
    ``pages``: of the rows; ``board``: what each asks for; ``allocated``: bytes, by the names of
    ``EngineStats``.
    """

    def __init__(
        self,
        lm: LanguageModel,
        pool_config: PoolConfig,
        texts: CachedSequences,
        count: int,
        rounds: int,
        exact: bool,
    ) -> None:
        self.lm, self.pool_config, self.prefixes, self.count = lm, pool_config, texts, count
        self.params, self.rounds, self.exact = sent(lm.params), rounds, exact
        self.widths = [pool_config.prefill_chunk]
        while (finer := self.widths[0] // 2) >= LEAST_WIDTH and len(self.widths) < WIDTHS:
            self.widths.insert(0, finer)
        self.sizes = [count]
        while not exact and self.sizes[0] > 1 and len(self.sizes) < SIZES:
            self.sizes.insert(0, -(-self.sizes[0] // 2))
        # All that its programs are given is committed: else they would be compiled again beside
        # parameters of a trainer, which are.
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
        past = self._no_text(count)
        numbers: Any = zeros, zeros, zeros == 0, zeros > 0
        rows = commit(placement.put((Progress(*numbers), past)))
        self._held = EngineState(replace(cache, pools=()), *rows)
        texts.pool.adopt(cache.layers)
        self.page_tables, self.sampling_state = (
            PageTables(texts, count),
            SamplingState(count, placement),
        )
        pool = texts.pool.nbytes
        rest = tree_bytes(self._held) - pool + tree_bytes(self.sampling_state.all())
        self.allocated: dict[str, Any] = {
            "weight_bytes": tree_bytes(self.params),
            "pool_bytes": pool,
            "row_bytes": rest,
        }

    def width(self, tokens: int) -> int:
        """What a chunk of so many tokens is padded to."""
        return next(width for width in self.widths if width >= tokens)

    def feed(self, seq: RunningSequence, length: int) -> ProgramOutput:
        """Send the next tokens of a prompt; their pages are the row's already."""
        start, end = seq.filled, seq.filled + length
        ends = end == len(seq.prompt)
        words = seq.handle.allowed(mask_words(self.lm.config)) if ends else None
        following = None
        if seq.handle.request.prompt_scores is not None:
            following = seq.prompt[start + 1 : end + 1]
        return self._fed(
            seq.row,
            seq.prompt[start:end],
            start,
            seq.fresh,
            seq.forced(1)[0],
            ends,
            words,
            following=following,
        )

    def read(self, row: int, tokens: Sequence[int], start: int, width: int = 1) -> None:
        """Send tokens behind so many of a row, in a chunk of a ``width`` at least, and choose
        none; their pages are the row's already."""
        self._fed(row, tokens, start, start == 0 and len(tokens) > 0, width=width)

    def _fed(
        self,
        row: int,
        tokens: Sequence[int],
        start: int,
        fresh: bool,
        first: int = -1,
        ends: bool = False,
        words: Any = None,
        width: int = 1,
        following: Sequence[int] | None = None,
    ) -> ProgramOutput:
        """Send a chunk; ``first``: the token to choose after it, if known; ``following``: the token
        after each of its tokens, if their scores are requested."""
        one, count, allowed = ints(row), len(tokens), self.every(1)
        padded: Any = np.zeros((1, self.width(max(count, width))), np.int32)
        padded[0, :count] = tokens
        if words is not None:
            allowed[0] = words
        piece = PrefillInputs(
            one,
            padded,
            ints(count),
            ints(start),
            self.tables(one),
            flag(fresh),
            flag(ends),
            ints(first),
            allowed,
            self.sampling_state.of(one),
        )
        then: Any = None
        if following is not None:
            then = np.zeros_like(padded)
            then[0, : len(following)] = following
        report: ProgramOutput = self.run(
            programs.feed, self.lm.architecture, self.params, piece, then
        )
        return report

    def decode(
        self, taking: Sequence[tuple[RunningSequence, int]], least: int = 0
    ) -> tuple[ProgramOutput, list[int]]:
        """Send so many rounds of some rows, whose pages are theirs already, in a program for
        ``least`` rows at least; and where each of them stands in the report."""
        each = [(seq, rounds, *taken) for seq, rounds in taking for taken in seq.taking]
        size = next(n for n in self.sizes if n >= max(len(each), least))
        rows, places = self.some([row for _, _, row, _ in each], size)
        lengths: Any = np.zeros(size, np.int32)
        number: Any = np.zeros(size, np.int32)
        forced: Any = np.full((size, self.rounds), -1, np.int32)
        allowed = self.every(size)
        for at, (seq, rounds, _, beam) in zip(places, each, strict=True):
            lengths[at], number[at] = seq.filled, rounds
            forced[at, :rounds] = seq.forced(rounds)
            words = seq.handle.allowed(allowed.shape[1], beam) if forced[at, 0] < 0 else None
            if words is not None:
                allowed[at] = words
        tables, asked = self.tables(rows), self.sampling_state.some(rows)
        call = DecodeInputs(rows, lengths, number, tables, forced, allowed, asked)
        report = self.run(
            programs.decode, self.lm.architecture, self.params, call, exact=self.exact
        )
        return report, places

    @property
    def past(self) -> Any:
        """The texts of all rows, where their filters go by them."""
        return self._held.past

    def some(self, own: list[int], size: int) -> tuple[Any, list[int]]:
        """Some rows, for a program of so many: int32[size], of what fills them up none's; and where
        each of them stands in it."""
        places = own if size == self.count else list(range(len(own)))
        rows: Any = np.arange(size, dtype=np.int32)
        if size < self.count:
            rows[:] = self.count
            rows[places] = own
        return rows, places

    def tables(self, rows: Any) -> Any:
        """Of some rows; copies, for what is sent may be read later."""
        there = np.minimum(rows, self.count - 1)
        return tuple(table[there].copy() for table in self.page_tables.tables)

    def every(self, rows: int) -> Any:
        """What allows all tokens."""
        return np.full((rows, mask_words(self.lm.config)), ALL_ALLOWED, np.uint32)

    def take(self, row: int, tokens: int) -> Any:
        """What a row of so many tokens has beside full pages, and where it stands: see
        ``programs.take``."""
        pages = self.page_tables.partly(row, tokens)
        some = [
            (kind, page)
            for kind, page in zip(self.pool_config.groups, pages, strict=True)
            if kind.page_group.split is not None
        ]
        return programs.take(
            self._with_pages(),
            np.int32(row),
            [ints(page) for _, page in some],
            splits=tuple(kind.layers for kind, _ in some),
        )

    def put(self, row: int, rows: Any, stands: Any) -> None:
        """Let a row have what ``take`` gave, and stand there."""
        self.run(programs.put, np.int32(row), rows, stands)

    def put_state(self, row: int, state: Sequence[Any], fresh: Sequence[int]) -> None:
        """Let a row begin with what a text had beside full pages; ``fresh``: of each kind of
        layers, its page that is not full, or -1."""
        like = [row_arrays(layer) for layer in self._held.cache.layers], self._held.cache.written
        leaves, form = jax.tree.flatten(like)
        rows = jax.tree.unflatten(form, [np.asarray(x) for x in state[: len(leaves)]])
        at = len(leaves)
        for number, kind in enumerate(self.pool_config.groups):
            if kind.page_group.split is None:
                continue
            count = len(jax.tree.leaves([self.prefixes.pool.bodies[n] for n in kind.layers]))
            if fresh[number] >= 0:
                part = [np.asarray(x) for x in state[at : at + count]]
                self.prefixes.pool.write(number, [fresh[number]], [part])
            at += count
        self.put(row, rows, self._nowhere())

    def branch(
        self,
        pairs: Sequence[tuple[int, int]],
        pages: Sequence[Sequence[tuple[int, int]]],
        newest: Sequence[tuple[int, int]],
    ) -> None:
        """Let rows go on from others, and have other newest tokens; ``pages``: of each pair, and of
        each kind, what is copied: see ``branch_inputs``."""
        kinds = self.pool_config.groups
        copied = [[each[number] for each in pages] for number in range(len(kinds))]
        branches = branch_inputs(self.count, pairs, copied, newest)
        self.run(branch, branches, kinds=tuple(kind.layers for kind in kinds))

    def mark(self, row: int, tokens: Sequence[int]) -> None:
        """Let these be the tokens that a row's filters go by."""
        ids = np.full(self.pool_config.max_len, self.lm.config.vocab_size, np.int32)
        ids[: len(tokens)] = tokens
        self.run(programs.mark, np.int32(row), ids, np.int32(len(tokens)))

    def compile(self) -> int:
        """Run every program once, without tokens; how many there are of the model. Rows may be in
        use."""
        (rows, _), stands = jax.device_get(self.take(0, 0))
        for width in self.widths:
            self.read(0, [], 0, width)
        for size in self.sizes:
            self.decode([], size)
        self.mark(0, [])
        self.branch([], [], [])
        self.put(0, rows, stands)
        for number in range(len(self.pool_config.groups)):
            self.prefixes.pool.warm_up(number)
        jax.block_until_ready(self._with_pages())
        return len(self.widths) + len(self.sizes)

    def _nowhere(self) -> Any:
        """Where a row stands that has no new tokens."""
        numbers: Any = np.int32(0), np.int32(0), np.bool_(False), np.bool_(False)
        return Progress(*numbers), jax.tree.map(lambda x: x[0], self._no_text(1))

    def _no_text(self, rows: int) -> Any:
        """Of so many rows."""
        return make_history(
            [[]] * rows,
            vocab=self.lm.config.vocab_size,
            width=self.pool_config.max_len,
            seen=True,
            tokens=True,
        )

    def run(self, program: Any, *args: Any, **settings: Any) -> Any:
        """Send a program that uses up what the device has, and gives it back first."""
        self._held, report = program(self._with_pages(), *args, **settings)
        self.prefixes.pool.adopt(self._held.cache.layers)
        return report

    def _with_pages(self) -> EngineState:
        """What the device has, with the pool's pages as they are now."""
        held = self._held
        layers = [
            layer if body is None else replace(layer, keys=body[0], values=body[1])
            for layer, body in zip(held.cache.layers, self.prefixes.pool.bodies, strict=True)
        ]
        return replace(held, cache=replace(held.cache, layers=tuple(layers)))


def ints(*numbers: int) -> Any:
    """int32[n]."""
    return np.array(numbers, np.int32)


def flag(truth: bool) -> Any:
    """bool[1]."""
    return np.array([truth])


def sent(params: Any) -> Any:
    """Parameters as programs are given them: arrays of JAX, committed, none weakly typed."""
    there = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.device_put(x), params)
    return commit(without_weak_types(there))


def alike(params: Any, those: Any) -> Any:
    """Parameters that are to be sent in the place of ``those``, committed.

    Raises:
      ValueError: if they are not of the same shapes, dtypes and devices.
    """
    try:
        check_params_match(params, those)
    except ValueError as error:
        raise ValueError(f"the parameters are not those of the engine's model: {error}") from None
    params = sent(params)
    each = zip(jax.tree.leaves(params), jax.tree.leaves(those), strict=True)
    if any(x.sharding != there.sharding for x, there in each):
        raise ValueError(
            "the parameters are not those of the engine's model: they are on other devices, or "
            "divided otherwise; lm.put(params) moves them"
        )
    return params
