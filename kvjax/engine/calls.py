"""What the programs of an engine are given, and what they give."""

from jaxtyping import Int

from kvjax.cache.state import KVCache
from kvjax.core.trees import state
from kvjax.core.typing import Array, PerRow, RowMask, Tokens
from kvjax.generation.programs import Progress
from kvjax.sampling.filters import Allowed
from kvjax.sampling.history import Past
from kvjax.sampling.params import Sampling
from kvjax.sampling.scores import Scores


@state
class Held:
    """What the device has of all rows: ``cache``, whose lengths and tables are given anew with each
    program; ``progress``, where each row stands; ``past``: the text of each row, which its filters
    go by, where they do; else anything."""

    cache: KVCache
    progress: Progress
    past: Past


@state
class Asked:
    """What rows are asked for, an entry a row: the numbers of sampling; ``limit``: int32, new
    tokens after which each is done; ``scores``: int32, 0 for no log-probability, else one more than
    the likeliest tokens that are told; ``search``: bool, whether these are of those allowed."""

    sampling: Sampling
    limit: PerRow
    scores: PerRow
    search: RowMask


@state
class Piece:
    """A chunk of the prompts of some rows.

    ``rows``: int32[n], which; ``tokens``: int32[n, new], ``lengths`` of them real, behind the
    ``starts`` that they have; ``tables``: of each kind of layers, int32[n, columns]. ``fresh``:
    bool[n], rows that begin, and have nothing but pages; ``ends``: bool[n], prompts that end here;
    ``forced``: int32[n], their first tokens, where these are known, or -1; ``allowed``: bits of
    what these may be.
    """

    rows: PerRow
    tokens: Tokens
    lengths: PerRow
    starts: PerRow
    tables: tuple[Array, ...]
    fresh: RowMask
    ends: RowMask
    forced: PerRow
    allowed: Allowed
    asked: Asked


@state
class Rounds:
    """Some rounds of decoding, of all rows in order, or of some.

    ``rows``: int32[n], which; ``lengths``: int32[n], tokens that each has in the cache; ``rounds``:
    int32[n], how many it takes part in; ``tables``: as of ``Piece``; ``forced``: int32[n, most],
    tokens that are known already, or -1. ``allowed``: bits of what the first of them may be.
    """

    rows: PerRow
    lengths: PerRow
    rounds: PerRow
    tables: tuple[Array, ...]
    forced: Int[Array, "rows most"]
    allowed: Allowed
    asked: Asked


@state
class Report:
    """What a program has done: ``tokens``: int32[rows, most], those that it chose, as many of a row
    as its ``count`` has grown by; their ``scores``, where they were asked for; ``count``, ``done``,
    ``broken``: as of ``Progress``; ``status``: int32[rows], of the cache; ``prompt``: scores of the
    tokens of a prompt, [1, new], each of the next one, if they were requested."""

    tokens: Int[Array, "rows most"]
    scores: Scores
    count: PerRow
    done: RowMask
    broken: RowMask
    status: PerRow
    prompt: Scores | None = None
