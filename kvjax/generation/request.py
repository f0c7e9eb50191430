"""A generation request: its checks and defaults, and the split of its prompts into chunks."""

from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.checks import check, validated
from kvjax.cache.state import KVCache
from kvjax.core.mesh_context import explicit_mesh
from kvjax.core.transfer import fetch
from kvjax.core.validation import (
    INT32_MAX,
    MAX_DIMENSION,
    ArgumentError,
    as_int,
    as_optional_int,
    as_python,
)
from kvjax.generation.beams.step import SearchConfig, resolve_search
from kvjax.generation.cache_choice import (
    encoder_inputs,
    limit_memory,
    parse_cache,
    parse_prefix_cache,
    parse_rotary_len,
    size_pools,
)
from kvjax.generation.drafts.draft_model import Draft, check_draft_positions, resolve_draft
from kvjax.generation.encoder import source_bytes
from kvjax.generation.guides.masks import CopyableGuide, parse_guides
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import capacity_bucket, check_model, choose_capacity, grown_capacity
from kvjax.generation.options import (
    GenerationOptions,
    Prompts,
    parse_eos_token_ids,
    parse_logit_bias,
    parse_logprobs,
    parse_seeds,
    parse_stop,
    tokenize_prompts,
)
from kvjax.layouts import UNLIMITED
from kvjax.operations.capacity import check_budget
from kvjax.placement.device import Device
from kvjax.placement.mesh import MeshSharding, shard_over
from kvjax.policies.model_config import common_heads, positions_needed, same_rotary
from kvjax.policies.presets import PolicyChoice
from kvjax.prefixes.tree import Tenant
from kvjax.sampling.params import Filters, SamplingArrays

_SMALLEST_WIDTH = 16
"""The minimum width, in tokens, of the chunks for which programs are compiled."""


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request.

    Attributes:
      prompts: token ids of each prompt. Empty prompts at the end fill the rows of a mesh.
      rows: the number of rows of the result, which is prompts times ``samples``, without rows that
        fill a mesh.
      mesh_sharding: how the devices of a mesh divide the rows; None for one device.
      cache_lengths: int64[batch], the number of tokens in each row of the given cache.
      positions: the maximum number of positions that a row needs, prompt and new tokens together.
      capacity: the number of tokens per row for which the cache, or the uncached sequence, is first
        allocated.
      max_len: the maximum number of tokens per row that the cache may ever have; None for no limit.
      prefill_chunk: the maximum number of tokens of a prompt that one prefill call processes.
      policy: the policy of the cache to create; None if none is created.
      cache: the cache to continue; None if none was given.
      eos_token_ids, stop, max_new_tokens, min_new_tokens: settings of when a row ends.
      filters, sampling: settings of how tokens are drawn.
      samples: the number of continuations of each prompt, which are in consecutive rows.
      prefix_cache: the tree that may contain prefixes of the prompts.
      logprobs: how many of the most likely tokens are reported with each new token; None for no
        log-probabilities.
      padded: whether the result has arrays instead of lists.
      encoder_tokens: texts that the encoder reads first; None without an encoder.
      draft: the draft that proposes tokens for the model to verify.
      cache_tokens: the tokens in each row of the given cache, if known.
      guides: the grammar constraint of each row; None if no row has one.
      search: settings of how results are selected among the samples; None if all are returned.
      rotary_len: as for ``init_cache``.
      home: the mesh on which the cache is returned, see ``kvjax.core.mesh_context``.
    """

    prompts: list[list[int]]
    rows: int
    mesh_sharding: MeshSharding | None
    cache_lengths: np.ndarray
    positions: int
    capacity: int
    max_len: int | None
    prefill_chunk: int
    policy: PolicyChoice | None
    cache: KVCache | None
    eos_token_ids: frozenset[int]
    stop: tuple[str, ...]
    max_new_tokens: int
    filters: Filters
    sampling: SamplingArrays
    samples: int = 1
    prefix_cache: Tenant | None = None
    logprobs: int | None = None
    padded: bool = False
    encoder_tokens: list[list[int]] | None = None
    draft: Draft | None = None
    cache_tokens: list[list[int]] | None = None
    guides: tuple[CopyableGuide | None, ...] | None = None
    search: SearchConfig | None = None
    min_new_tokens: int = 0
    rotary_len: int | None = None
    home: Mesh | None = None

    @property
    def row_prompts(self) -> list[list[int]]:
        """The prompt of every row, including empty rows that fill a mesh."""
        return [ids for ids in self.prompts for _ in range(self.samples)]

    @property
    def row_sequences(self) -> list[list[int]]:
        """All known tokens of every row: first the tokens in the given cache, then the prompt.
        Penalties and hooks see them, and detokenization starts from them."""
        if self.cache_tokens is None:
            return self.row_prompts
        rows = zip(self.cache_tokens, self.row_prompts, strict=True)
        return [[*cached, *ids] for cached, ids in rows]

    @property
    def can_stop_early(self) -> bool:
        """Whether a generation may be stopped before its prompts are prefilled. This is False if
        rows share prompts or pages."""
        return self.samples == 1 and self.prefix_cache is None

    @property
    def history_len(self) -> int:
        """The width of the token history that penalties and hooks see. If the given cache has no
        length limit, it covers only this request."""
        if self.capacity < UNLIMITED:
            return self.capacity
        longest = max(map(len, self.row_sequences))
        return capacity_bucket(positions_needed(longest, self.max_new_tokens))

    def padded_width(self, tokens: int) -> int:
        """Return the width to which a chunk of ``tokens`` tokens is padded."""
        if self.policy is None and self.cache is None:
            return self.capacity
        return padded_width(tokens, self.prefill_chunk)


def prepare_request(
    lm: LanguageModel, prompts: Prompts, options: GenerationOptions
) -> GenerationRequest:
    """Check a request against the model and resolve its defaults.

    Raises:
      ValueError: if an argument is wrong. The error names the argument and its limit.
    """
    check_model(lm)
    new_tokens = as_int("max_new_tokens", options.max_new_tokens, 1, MAX_DIMENSION)
    min_new_tokens = as_int("min_new_tokens", options.min_new_tokens, 0)
    chunk = as_int("prefill_chunk", options.prefill_chunk, 1, INT32_MAX)
    options = replace(
        options, max_len=as_optional_int("max_len", options.max_len, 1, MAX_DIMENSION)
    )
    if min_new_tokens > new_tokens:
        message = f"min_new_tokens is {min_new_tokens}, but max_new_tokens is only {new_tokens}"
        raise ArgumentError(message, param="min_new_tokens")
    cache, policy = parse_cache(options)
    draft = resolve_draft(lm, options.draft)
    if draft is not None and not options.use_cache:
        raise ValueError("a draft needs a cache: leave out draft= or use_cache=False")
    mesh_sharding = None if lm.mesh is None else shard_over(lm.mesh, common_heads(lm.config))
    cache_lengths: list[int] = []
    if cache is not None:
        cache = validated("kvjax.generate", cache, outside=True)
        if cache.mesh_sharding != mesh_sharding:
            raise ValueError(
                "the cache is not spread over the model's devices: "
                "kvjax.migrate(cache, mesh=lm.mesh) moves it there"
            )
        cache_lengths = fetch(cache.length).tolist()
    encoder_tokens = encoder_inputs(lm, prompts, options)
    if encoder_tokens is None:
        rows = tokenize_prompts(lm, prompts, cache_lengths)
    else:
        rows = [[lm.decoder_start_token_id]] * len(encoder_tokens)
    count = len(rows)
    samples, search = resolve_search(options)
    random = search is None or search.beams is None
    seeds = parse_seeds(options.seed if random else 0, count * samples)
    empty = 0 if mesh_sharding is None else -count % mesh_sharding.rows
    rows, seeds = [*rows, *[[]] * empty], [*seeds, *[0] * empty * samples]
    if cache is not None:
        # After the rows of the prompts, the cache may have empty rows that fill a mesh.
        if cache.batch != len(rows):
            raise ValueError(f"the cache has {cache.batch} rows, but there are {count} prompts")
        if any(cache_lengths[count:]):
            filled = 1 + max(row for row, length in enumerate(cache_lengths) if length)
            raise ValueError(
                f"the cache has tokens in {filled} rows, but there are {count} prompts"
            )
        check(cache)
    start = np.asarray(cache_lengths or [0] * len(rows), np.int64)
    longest = int(np.max(start + [len(ids) for ids in rows]))
    prefix_cache = parse_prefix_cache(options)
    if prefix_cache is not None:
        tree = prefix_cache.tree
        policy = tree.pool_config.policies
        options = replace(options, max_len=tree.pool_config.max_len)
        chunk = tree.pool_config.prefill_chunk
    positions = positions_needed(longest, new_tokens)
    rotary_len = parse_rotary_len(lm.config, options, positions)
    capacity = choose_capacity(
        lm.config, longest, new_tokens, options.max_len, cache, rounded=rotary_len is not None
    )
    check_draft_positions(draft, positions)
    if policy is not None and samples > 1 and prefix_cache is None:
        lengths = [len(ids) for ids in rows]
        policy = size_pools(lm.config, policy, lengths, new_tokens, samples, rows=len(rows))
    if policy is not None:
        policy = limit_memory(lm, policy, options.limits, len(rows) * samples, capacity)
    if cache is not None:
        check_budget(cache, grown_capacity(cache, positions))
    if options.limits is not None:
        source = 0
        if encoder_tokens is not None:
            source = source_bytes(lm, policy, encoder_tokens, len(rows))
        options.limits.check(
            lm,
            policy,
            batch=len(rows) * samples,
            prompts=count * samples,
            need=max([positions, *map(len, encoder_tokens or ())]),
            capacity=capacity,
            other_bytes=source,
        )
    eos = parse_eos_token_ids(lm, options.eos_token_ids)
    bias = parse_logit_bias(lm.config, options.logit_bias)
    params = replace(options, min_new_tokens=min_new_tokens, logit_bias=bias)
    filters, sampling = params.prepare(seeds, eos)
    total = len(rows) * samples
    return GenerationRequest(
        prompts=rows,
        rows=count * samples,
        mesh_sharding=mesh_sharding,
        cache_lengths=start,
        positions=positions,
        capacity=capacity,
        # Length-dependent rotary frequencies need a finite length.
        max_len=as_python(options.max_len) if same_rotary(lm.config, 1, UNLIMITED) else capacity,
        # Without a cache, every pass processes the whole sequence as one chunk.
        prefill_chunk=chunk if options.use_cache else capacity,
        policy=policy,
        cache=cache,
        eos_token_ids=frozenset(eos),
        stop=parse_stop(lm, options.stop),
        max_new_tokens=new_tokens,
        filters=replace(filters, mesh=mesh_sharding is not None),
        sampling=sampling,
        samples=samples,
        prefix_cache=prefix_cache,
        logprobs=parse_logprobs(lm.config, options.logprobs),
        padded=options.padded,
        encoder_tokens=encoder_tokens,
        draft=draft,
        guides=parse_guides(lm.config, options.guide, count, samples, total, eos, min_new_tokens),
        search=search,
        min_new_tokens=min_new_tokens,
        rotary_len=rotary_len,
        home=explicit_mesh(),
    )


def padded_width(tokens: int, chunk: int) -> int:
    """Return the width to which the last ``tokens`` tokens of a prompt are padded. It is a power of
    two of at least 16, or ``chunk`` if that is less. This limits the number of compiled
    programs."""
    return min(chunk, max(_SMALLEST_WIDTH, 1 << (tokens - 1).bit_length()))


@dataclass(frozen=True)
class PromptChunk:
    """Tokens of the prompts that one prefill call processes.

    Attributes:
      tokens: int32[batch, new], padded on the right, on the device.
      lengths: int32[batch], the number of real tokens of each row.
      ends: bool[batch], the rows whose prompts end in this chunk.
      cache_len: the number of tokens in the cache's longest row after this chunk.
    """

    tokens: jax.Array
    lengths: np.ndarray
    ends: np.ndarray
    cache_len: int


def prompt_chunks(request: GenerationRequest, cached: np.ndarray | int = 0) -> list[PromptChunk]:
    """Split a request's prompts into chunks, without their first ``cached`` (int[batch]) tokens.
    This also starts the transfer of the tokens to the device."""
    cached, size = np.broadcast_to(cached, len(request.prompts)), request.prefill_chunk
    prompts = [ids[hit:] for ids, hit in zip(request.prompts, cached, strict=True)]
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    chunks = []
    for start in range(0, int(lengths.max()), size):
        real = np.clip(lengths - start, 0, size)
        tokens = np.zeros((len(lengths), request.padded_width(int(real.max()))), np.int32)
        for row, ids in enumerate(prompts):
            tokens[row, : real[row]] = ids[start : start + size]
        ends = (lengths > start) & (lengths <= start + size)
        on_device = Device(mesh_sharding=request.mesh_sharding).put(tokens)
        filled = request.cache_lengths + cached + np.minimum(lengths, start + size)
        chunks.append(PromptChunk(on_device, real, ends, int(filled.max())))
    return chunks
