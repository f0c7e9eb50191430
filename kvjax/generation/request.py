"""What a generation was asked for, checked before anything runs."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from kvjax.cache.checks import check, validated
from kvjax.cache.state import KVCache
from kvjax.core.mesh_context import explicit_mesh
from kvjax.core.transfer import fetch
from kvjax.core.validation import INT32_MAX, MAX_DIMENSION, as_int, as_optional_int, as_python
from kvjax.generation.beams.searching import Search, rows_asked
from kvjax.generation.cache_choice import (
    cache_choice,
    for_samples,
    known_prefixes,
    rotary_asked,
    texts_to_read,
    with_memory,
)
from kvjax.generation.capacity import capacity_bucket, capacity_for, grown_to
from kvjax.generation.drafts.asked import Draft, check_length, draft_of
from kvjax.generation.encoder import bytes_of_source
from kvjax.generation.guides.masks import FormOfText, guides_of
from kvjax.generation.inputs import (
    Prompts,
    biases,
    end_tokens,
    row_seeds,
    stop_strings,
    token_ids,
    told_scores,
)
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import check_model
from kvjax.generation.options import Options
from kvjax.layouts import UNLIMITED
from kvjax.operations.capacity import check_budget
from kvjax.placement.device import Device
from kvjax.placement.mesh import MeshSharding, shard_over
from kvjax.policies.model_config import common_heads, positions_needed, same_rotary
from kvjax.policies.presets import PolicyChoice
from kvjax.prefixes.tree import Tenant
from kvjax.sampling.params import Filters, Sampling, make_settings

_SMALLEST_CHUNK = 16


@dataclass(frozen=True)
class Request:
    """A generation that can run.

    ``prompts``: token ids, a row; ``samples``: continuations of each, rows one behind the other;
    ``rows``: how many of these were asked for, the others are empty;
    ``spread``: how the devices of a mesh share them, None for one device;
    ``start``: tokens that a given cache holds already, a row;
    ``policy``: of the cache to make, or None where none is made; ``capacity``: tokens that it, or
    the text without a cache, has room for at first; ``max_len``: tokens that it may ever hold, or
    None; ``need``: places that prompts and new text take in it, at most;
    ``prefixes``: where their beginnings may be known; ``scores``: the likeliest tokens that are
    told with each new one, None for no log-probabilities; ``to_read``: what an encoder reads first;
    ``before``: of each row, the tokens that a given cache holds, where they are known; ``draft``:
    what proposes tokens, None for nothing; ``guides``: of every row, the others' among them, what
    it keeps to, or None; None for no row; ``search``: which of the samples are given back, None for
    all; ``least``: new tokens before which no text ends; ``rotary_len``: as of ``init_cache``;
    ``home``: the mesh that its cache is given back on, see ``kvjax.core.mesh_context``.
    """

    prompts: list[list[int]]
    rows: int
    spread: MeshSharding | None
    start: np.ndarray
    need: int
    capacity: int
    max_len: int | None
    chunk: int
    policy: PolicyChoice | None
    cache: KVCache | None
    eos: frozenset[int]
    stops: tuple[str, ...]
    limit: int
    filters: Filters
    settings: Sampling
    samples: int = 1
    prefixes: Tenant | None = None
    scores: int | None = None
    padded: bool = False
    to_read: list[list[int]] | None = None
    draft: Draft | None = None
    before: list[list[int]] | None = None
    guides: tuple[FormOfText | None, ...] | None = None
    search: Search | None = None
    least: int = 0
    rotary_len: int | None = None
    home: Mesh | None = None

    @property
    def texts(self) -> list[list[int]]:
        """The prompt of every row of the result, those that fill a mesh up among them."""
        return [row for row in self.prompts for _ in range(self.samples)]

    @property
    def known_texts(self) -> list[list[int]]:
        """``texts``, behind what the cache holds already where that is known: what penalties, hooks
        and the new text's first characters go by."""
        if self.before is None:
            return self.texts
        return [[*held, *ids] for held, ids in zip(self.before, self.texts, strict=True)]

    @property
    def may_be_cut(self) -> bool:
        """Whether a text may end while its prompt is read: each has a row of its own."""
        return self.samples == 1 and self.prefixes is None

    @property
    def room(self) -> int:
        """Tokens that filters and hooks may be shown of a row: of a given cache that has no end,
        those of this request, not all that it can hold."""
        if self.capacity < UNLIMITED:
            return self.capacity
        return capacity_bucket(positions_needed(max(map(len, self.known_texts)), self.limit))

    def width(self, tokens: int) -> int:
        """What a chunk of so many tokens is padded to, so that few widths are ever compiled."""
        if self.policy is None and self.cache is None:
            return self.capacity
        return chunk_bucket(tokens, self.chunk)


def prepare(lm: LanguageModel, prompts: Prompts, options: Options) -> Request:
    """Check a request against the model, and fix what was left open.

    Raises:
      ValueError: naming what can't be, and its limit.
    """
    check_model(lm)
    limit = as_int("max_new_tokens", options.max_new_tokens, 1, MAX_DIMENSION)
    least = as_int("min_new_tokens", options.min_new_tokens, 0)
    chunk = as_int("prefill_chunk", options.prefill_chunk, 1, INT32_MAX)
    options = replace(
        options, max_len=as_optional_int("max_len", options.max_len, 1, MAX_DIMENSION)
    )
    if least > limit:
        raise ValueError(f"min_new_tokens is {least}, but max_new_tokens only {limit}")
    given, chosen = cache_choice(options)
    draft = draft_of(lm, options.draft)
    if draft is not None and not options.use_cache:
        raise ValueError("a draft was given together with use_cache=False: a cache checks it")
    spread = None if lm.mesh is None else shard_over(lm.mesh, common_heads(lm.config))
    held: list[int] = []
    if given is not None:
        given = validated("kvjax.generate", given, outside=True)
        if given.spread != spread:
            raise ValueError(
                "the cache is not spread over the devices that the model is on: "
                "kvjax.migrate(cache, mesh=lm.mesh) moves it there"
            )
        held = fetch(given.length).tolist()
    texts = texts_to_read(lm, prompts, options)
    begun = None if texts is None else [[lm.start_token]] * len(texts)
    rows = token_ids(lm, prompts, held) if begun is None else begun
    n, search = rows_asked(options)
    drawn = search is None or search.beams is None
    seeds, asked = row_seeds(options.seed if drawn else 0, len(rows) * n), len(rows)
    more = 0 if spread is None else -len(rows) % spread.rows
    rows, seeds = [*rows, *[[]] * more], [*seeds, *[0] * more * n]
    if given is not None:
        # Behind the rows of prompts may stand those that a mesh is filled up with: empty ones.
        if given.batch != len(rows):
            raise ValueError(f"the cache has {given.batch} rows, but there are {asked} prompts")
        if any(held[asked:]):
            filled = 1 + max(row for row, tokens in enumerate(held) if tokens)
            raise ValueError(f"the cache has texts in {filled} rows, but there are {asked} prompts")
        check(given)
    start = np.asarray(held or [0] * len(rows), np.int64)
    longest = int(np.max(start + [len(row) for row in rows]))
    prefixes = known_prefixes(options)
    if prefixes is not None:
        tree = prefixes.tree
        chosen, options = tree.terms.policies, replace(options, max_len=tree.terms.max_len)
        chunk = tree.terms.prefill_chunk
    need = positions_needed(longest, limit)
    rotary_len = rotary_asked(lm.config, options, need)
    capacity = capacity_for(
        lm.config, longest, limit, options.max_len, given, rounded=rotary_len is not None
    )
    check_length(draft, need)
    if chosen is not None and n > 1 and prefixes is None:
        chosen = for_samples(
            lm.config, chosen, [len(row) for row in rows], limit, n, rows=len(rows)
        )
    if chosen is not None:
        chosen = with_memory(lm, chosen, options.limits, len(rows) * n, capacity)
    if given is not None:
        check_budget(given, grown_to(given, need))
    if options.limits is not None:
        options.limits.check(
            lm,
            chosen,
            batch=len(rows) * n,
            prompts=asked * n,
            need=max([need, *map(len, texts or ())]),
            capacity=capacity,
            beside=0 if texts is None else bytes_of_source(lm, chosen, texts, len(rows)),
        )
    eos = end_tokens(lm, options.eos_token_ids)
    filters, settings = make_settings(
        seeds=seeds, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
        min_p=options.min_p, typical_p=options.typical_p,
        repetition_penalty=options.repetition_penalty,
        frequency_penalty=options.frequency_penalty, presence_penalty=options.presence_penalty,
        no_repeat_ngram_size=options.no_repeat_ngram_size,
        min_new_tokens=least, eos_token_ids=eos, logit_bias=biases(lm.config, options.logit_bias),
        logits_hook=options.logits_hook,
    )  # fmt: skip
    filters = replace(filters, mesh=spread is not None)
    return Request(
        prompts=rows, rows=asked * n, spread=spread, start=start, need=need,
        capacity=capacity,
        # A text without end would have no frequencies where they depend on its length.
        max_len=as_python(options.max_len) if same_rotary(lm.config, 1, UNLIMITED) else capacity,
        # Without a cache every pass is over the whole capacity, so there is nothing to cut.
        chunk=chunk if options.use_cache else capacity,
        policy=chosen, cache=given, eos=frozenset(eos), stops=stop_strings(lm, options.stop),
        limit=limit, filters=filters, settings=settings, samples=n, prefixes=prefixes,
        scores=told_scores(lm.config, options.logprobs), padded=options.padded, to_read=texts,
        guides=guides_of(lm.config, options.guide, asked, n, len(rows) * n, eos, least),
        draft=draft, home=explicit_mesh(),
        search=search, least=least, rotary_len=rotary_len,
    )  # fmt: skip


def chunk_bucket(tokens: int, chunk: int) -> int:
    """The width that the last ``tokens`` of a prompt are padded to: a power of two from 16 up,
    and at most ``chunk``."""
    return min(chunk, max(_SMALLEST_CHUNK, 1 << (tokens - 1).bit_length()))


@dataclass(frozen=True)
class Chunk:
    """Tokens of the prompts that are fed together.

    ``tokens``: int32[batch, new], padded on the right, on the device; ``lengths``: int32[batch],
    how many are real; ``ends``: bool[batch], rows whose prompts end here; ``held``: tokens that the
    longest row holds after it.
    """

    tokens: Any
    lengths: np.ndarray
    ends: np.ndarray
    held: int


def prompt_chunks(request: Request, hits: np.ndarray | int = 0) -> list[Chunk]:
    """The chunks of a request's prompts behind their first ``hits`` tokens, int[batch], which the
    cache has already; their tokens are on their way to the device."""
    hits = np.broadcast_to(hits, len(request.prompts))
    prompts = [ids[hit:] for ids, hit in zip(request.prompts, hits, strict=True)]
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    chunks = []
    for start in range(0, int(lengths.max()), request.chunk):
        here = np.clip(lengths - start, 0, request.chunk)
        tokens = np.zeros((len(lengths), request.width(int(here.max()))), np.int32)
        for row, ids in enumerate(prompts):
            tokens[row, : here[row]] = ids[start : start + request.chunk]
        held = int((request.start + hits + np.minimum(lengths, start + request.chunk)).max())
        ends = (lengths > start) & (lengths <= start + request.chunk)
        chunks.append(Chunk(Device(spread=request.spread).put(tokens), here, ends, held))
    return chunks
