"""Faults of one line, planted in copies of the library: do the tests notice?

    python -m tests.planted_faults                 all of them
    python -m tests.planted_faults --only scale    those with a word in their name
    python -m tests.planted_faults --part 0/4      a quarter of them

A fault is caught when a test fails. The tests of the README's command run first, then the slow ones
that ``.ci/run`` adds; of each, the fault's likeliest files before all others. Prints a table, and
ends with exit code 1 if a fault was not caught.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Fault(NamedTuple):
    """A line of a file, what it becomes, and the test files that should notice first."""

    name: str
    file: str
    line: str
    fault: str
    first: tuple[str, ...]


FAULTS = (
    Fault(
        "the high-water mark is not kept", "cache/appending.py",
        "written = jnp.maximum(cache.written, length[:, None])",
        "written = length[:, None] + 0 * cache.written", ("cache", "layouts"),
    ),
    Fault(
        "a query sees the next token", "attention/mask.py",
        "seen = (keys >= 0) & (keys <= queries)",
        "seen = (keys >= 0) & (keys <= queries + 1)", ("recompute", "attention"),
    ),
    Fault(
        "a window is one token too wide", "attention/mask.py",
        "seen &= (keys > queries - self.window) | (keys < self.sinks)",
        "seen &= (keys >= queries - self.window) | (keys < self.sinks)", ("recompute", "attention"),
    ),
    Fault(
        "blocks leave the tail a token too early", "layouts/split.py",
        "return xp(tokens).maximum((tokens - 1) // self.block - self.recent, 0)",
        "return xp(tokens).maximum(tokens // self.block - self.recent, 0)", ("tail", "recompute"),
    ),
    Fault(
        "one block too many is seen raw", "layouts/split.py",
        "return jnp.maximum(positions // self.block - self.recent, 0) * self.block",
        "return jnp.maximum(positions // self.block - self.recent - 1, 0) * self.block",
        ("tail", "recompute"),
    ),
    Fault(
        "a zero point is forgotten", "codecs/integer.py",
        "scaled = scaled + self.decode_scale(store.zero)", "pass", ("codecs",),
    ),
    Fault(
        "empty slots contribute to the weighted values of few rows", "codecs/codec.py",
        "where = None if present is None else weights != 0",
        "where = None if present is None else weights > -1", ("t4",),
    ),
    Fault(
        "a scale of 8-bit floats is forgotten", "codecs/scales.py",
        "return in_range(self.groups.join(split * self.decode_scale(store.scale)), self.dtype)",
        "return in_range(self.groups.join(split), self.dtype)", ("codecs",),
    ),
    Fault(
        "scales are rounded down", "codecs/integer.py",
        "return rounded(reach / self._levels, kind, up=True), zero",
        "return rounded(reach / self._levels, kind, up=False), zero", ("codecs",),
    ),
    Fault(
        "an overflow sets no status", "cache/appending.py",
        "status = cache.status | flag_where(count < requested, OVERFLOW)",
        "status = cache.status | flag_where(count < requested, 0)", ("cache",),
    ),
    Fault(
        "padding overwrites a row's tokens", "placement/writing.py",
        "real = (token >= skip) & (token < count)",
        "real = (token >= skip) & (token < x.shape[1])", ("layouts", "recompute"),
    ),
    Fault(
        "a chunk that exceeds the capacity is shifted", "placement/writing.py",
        "x = jnp.roll(x, shift, axis=1)[:, :size]",
        "x = jnp.roll(x, 0 * shift, axis=1)[:, :size]", ("layouts", "recompute"),
    ),
    Fault(
        "a ring reports one rewindable token too many", "layouts/ring.py",
        "kept = jnp.where(written > self.slots, written - slack, 0)",
        "kept = jnp.where(written > self.slots, written - slack - 1, 0)", ("cache", "layouts"),
    ),
    Fault(
        "queries see sinks one position too late", "attention/attend.py",
        "cap = layout.sinks + min(windows) - 1 if layout.sinks else UNLIMITED",
        "cap = layout.sinks + min(windows) if layout.sinks else UNLIMITED", ("recompute",),
    ),
    Fault(
        "merged softmaxes do not rescale their total", "attention/softmax.py",
        "return Partial(highest, self.total * a + other.total * b, weighted)",
        "return Partial(highest, self.total + other.total, weighted)", ("cache", "buckets"),
    ),
    Fault(
        "devices do not agree on the highest score", "attention/softmax.py",
        "highest = lax.pmax(lax.stop_gradient(self.highest), axis)",
        "highest = lax.stop_gradient(self.highest)", ("mesh",),
    ),
    Fault(
        "tokens that two blocks share are counted twice", "cache/sections.py",
        "is_included = slots[None] >= start * self.unit", "is_included = slots[None] >= 0 * start",
        ("attention", "recompute"),
    ),
    Fault(
        "the device's copy of a host body lacks a block", "cache/storing.py",
        "fetched = None if fetched is None else kind.unflatten([near for _, near in both])",
        "fetched = fetched", ("placement",),
    ),
    Fault(
        "a converted cache forgets which tokens it lacks", "cache/reading.py",
        "return (positions >= layer_cache.low[:, None]) | sinks",
        "return (positions >= 0) | sinks", ("tail", "migrate"),
    ),
    Fault(
        "a grown layer loses its high-water mark", "operations/capacity.py",
        "return jnp.where(written > slots, written + wider - slots, written)",
        "return jnp.where(written > slots, written, written)", ("operations", "cache"),
    ),
    Fault(
        "a device of the mesh has its neighbor's slots", "layouts/split.py",
        "return LayoutSlice(layout, slots, shard.index * slots)",
        "return LayoutSlice(layout, slots, (shard.count - 1 - shard.index) * slots)", ("mesh",),
    ),
    Fault(
        "the decode loop does not donate its cache", "generation/programs.py",
        'static_argnames=("model", "filters", "logprobs"), donate_argnames=("context", "past")',
        'static_argnames=("model", "filters", "logprobs"), donate_argnames=("past",)',
        ("generate", "compilations", "transforms"),
    ),
    Fault(
        "the top-k threshold is one token short", "sampling/filters.py",
        "return jnp.where(ranking.ordered >= ranking.threshold(), logits, -jnp.inf)",
        "return jnp.where(ranking.ordered > ranking.threshold(), logits, -jnp.inf)",
        ("sampling",),
    ),
    Fault(
        "the count of a page is not lowered", "paging/allocator.py",
        'refs = self.refs.at[at].add(-1, mode="drop")',
        'refs = self.refs.at[at].add(0, mode="drop")', ("pages",),
    ),
    Fault(
        "a page that occurs twice is freed twice", "paging/allocator.py",
        "return self._pushed(refs, at, first & none & (at < self.pages))",
        "return self._pushed(refs, at, none & (at < self.pages))", ("pages",),
    ),
    Fault(
        "a page outside the pool is allocated", "paging/allocator.py",
        "return (more == 0) | (jnp.cumsum(more, dtype=jnp.int32) <= self.left[0])",
        "return (more == 0) | (jnp.cumsum(more, dtype=jnp.int32) <= self.left[0] + 1)", ("pages",),
    ),
    Fault(
        "a row receives only some of its pages", "paging/allocator.py",
        "new, old = new & granted[:, None], old & granted[:, None]",
        "new, old = new & (granted | granted[0])[:, None], old & granted[:, None]", ("pages",),
    ),
    Fault(
        "a page has two writers", "paging/allocator.py",
        "return page, valid & (others | earlier)",
        "return page, valid & others", ("pages",),
    ),
    Fault(
        "a row writes to a full page of another row", "paging/allocator.py",
        "return page, valid & (others | earlier)",
        "return page, valid & earlier", ("pages",),
    ),
    Fault(
        "the wrong page is copied", "placement/pages.py",
        "known = jnp.clip(source[number], 0, store.shape[0] - 1)",
        "known = jnp.clip(source[number] + 1, 0, store.shape[0] - 1)", ("pages",),
    ),
    Fault(
        "a page is taken before the last one is full", "layouts/paged.py",
        "return -(-tokens // self.page_size)",
        "return tokens // self.page_size + 1", ("pages",),
    ),
    Fault(
        "a window frees a page too early", "layouts/paged.py",
        "return xp(written).maximum(written - self._kept, 0) // self.page_size",
        "return -(-xp(written).maximum(written - self._kept, 0) // self.page_size)",
        ("pages", "recompute"),
    ),
    Fault(
        "tokens without a page are written to the last page", "placement/pages.py",
        'return lax.scatter(into, index, new, where, mode="drop")',
        'return lax.scatter(into, index, new, where, mode="clip")', ("pages",),
    ),
    Fault(
        "a rewind keeps its pages", "cache/paging.py",
        "results.append((pool.drop(after_end & ok[:, None]), copies))",
        "results.append((pool, copies))", ("pages",),
    ),
    Fault(
        "an invalid page number sets no status", "cache/appending.py",
        "wrong = flag_where(~granted, OUT_OF_PAGES) | flag_where(invalid, BAD_PAGE)",
        "wrong = flag_where(~granted, OUT_OF_PAGES) | flag_where(invalid, 0)", ("pages",),
    ),
    Fault(
        "a row without pages counts its tokens", "cache/appending.py",
        "count = jnp.where(granted, requested, 0)",
        "count = jnp.where(granted, requested, requested)", ("pages",),
    ),
    Fault(
        "pages are read in pool order", "placement/pages.py",
        "column = lax.dynamic_slice_in_dim(table, start // page, count, axis=1)",
        "column = lax.dynamic_slice_in_dim(jnp.sort(table), start // page, count, axis=1)",
        ("pages",),
    ),
    Fault(
        "a reset row keeps its pages", "operations/rows.py",
        "cache = replace(cache, pools=free_pages(cache, ~keep))",
        "cache = replace(cache, pools=cache.pools)", ("pages",),
    ),
    Fault(
        "a hit forgets the tenant", "prefixes/tree.py",
        "namespace = Namespace(tenant, self.weight_version, rows)",
        "namespace = Namespace(None, self.weight_version, rows)", ("prefixes",),
    ),
    Fault(
        "a hit forgets the version of the weights", "prefixes/tree.py",
        "namespace = Namespace(tenant, self.weight_version, rows)",
        "namespace = Namespace(tenant, 0, rows)", ("prefixes",),
    ),
    Fault(
        "a hit forgets how many rows were computed together", "prefixes/tree.py",
        "namespace = Namespace(tenant, self.weight_version, rows)",
        "namespace = Namespace(tenant, self.weights, None)", ("prefixes",),
    ),
    Fault(
        "matched prefixes are not locked", "prefixes/lease.py",
        "                node.lock_count += 1", "                node.lock_count += 0",
        ("prefixes",),
    ),
    Fault(
        "a prefix match leaves no token to compute", "prefixes/sequences.py",
        "path = sequences.radix.match(namespace, tokens[: len(tokens) - 1])",
        "path = sequences.radix.match(namespace, tokens)", ("prefixes",),
    ),
    Fault(
        "a checkpoint is taken one chunk late", "prefixes/lease.py",
        "[int(n) in row.checkpoint_positions for n,",
        "[int(n) - self._config.prefill_chunk in row.checkpoint_positions for n,", ("prefixes",),
    ),
    Fault(
        "a prefix is reused without its checkpoint", "prefixes/sequences.py",
        "if tokens % config.hit_multiple or not has_checkpoint:",
        "if tokens % config.hit_multiple:", ("prefixes",),
    ),
    Fault(
        "a hit ends inside a chunk", "prefixes/pool_config.py",
        "return math.lcm(self.node_tokens, self.prefill_chunk)",
        "return 1 * self.node_tokens", ("prefixes",),
    ),
    Fault(
        "rows of a request start at different prefix lengths", "prefixes/sequences.py",
        "match.path, match.hit = match.path[:common], common * node_tokens",
        "match.path, match.hit = match.path, match.hit", ("prefixes",),
    ),
    Fault(
        "tokens of decode steps are cached as if prefilled", "prefixes/lease.py",
        "length = min(length, len(prompt) // config.prefill_chunk * config.prefill_chunk)",
        "length = min(length, len(prompt) + 64)", ("prefixes",),
    ),
    Fault(
        "the most recently used page is evicted first", "prefixes/radix.py",
        "return node.last_used, not passed, node.depth if passed else -node.depth",
        "return -node.last_used, not passed, node.depth if passed else -node.depth", ("prefixes",),
    ),
    Fault(
        "a page of the prefix tree is counted twice", "prefixes/sequences.py",
        "            self.pool.allocators[group].retain(pool_page)",
        "            [self.pool.allocators[group].retain(pool_page) for _ in range(2)]",
        ("prefixes",),
    ),
    Fault(
        "bytes that left the host are still counted there", "prefixes/tiers.py",
        "self.bytes[entry.tier] -= entry.nbytes", "self.bytes[entry.tier] -= 0", ("prefixes",),
    ),
    Fault(
        "pages are restored in the wrong order", "prefixes/pool.py",
        "padded[: len(pages)] = pages", "padded[: len(pages)] = sorted(pages)", ("prefixes",),
    ),
    Fault(
        "checkpoints are kept after the sequence has passed them", "prefixes/radix.py",
        "passed = entry is node.checkpoint and len(node.children) == 1", "passed = False",
        ("prefixes",),
    ),
    Fault(
        "a finished row stores its checkpoint again", "prefixes/lease.py",
        "row.checkpoint_positions.discard(int(n))", "row.checkpoint_positions.discard(-1)",
        ("prefixes",),
    ),
    Fault(
        "a checkpoint of unknown tokens is kept", "prefixes/lease.py",
        "if row_tokens is not None and valid[row] and len(row_tokens[row]) >= length:",
        "if row_tokens is not None and valid[row]:", ("prefixes",),
    ),
    Fault(
        "samples share tokens that are in their tails", "generation/cache_choice.py",
        "shared = len(CacheGroup(page_group).pages_for(tokens)[0])",
        "shared = tokens // size", ("prefixes",),
    ),
    Fault(
        "a modified file is accepted", "core/array_folder.py",
        "if form == _FORMAT and check != _json_checksum(content):", "if form is None:", ("saving",),
    ),
    Fault(
        "the old file is removed before the new one exists", "core/array_folder.py",
        "    content = {", "    (path / NAME).unlink(missing_ok=True); content = {", ("saving",),
    ),
    Fault(
        "a saved cache is accepted for another model", "operations/saving.py",
        "if None not in (expected, saved) and expected != saved:",
        "if None not in (expected, saved) and not expected:", ("saving",),
    ),
    Fault(
        "the last filled slot is not saved", "operations/saving.py",
        "return max(int(policy.stored_layout.occupied(units)), 1)",
        "return max(int(policy.stored_layout.occupied(units)) - 1, 1)", ("saving",),
    ),
    Fault(
        "a cancellation is lost", "engine/engine.py",
        'self._inbox.append(lambda: handle.done or self._end(handle, "cancelled"))',
        "self._inbox.append(lambda: handle.done)", ("engine",),
    ),
    Fault(
        "a finished request keeps its row", "engine/scheduler.py",
        "            if seq.handle is handle:",
        "            if seq.handle is None:", ("engine",),
    ),
    Fault(
        "the bytes of a request that is swapped in stay counted", "engine/cache_manager.py",
        "            self._add_swapped_bytes(-handle.swapped.nbytes)",
        "            self._add_swapped_bytes(0)", ("engine",),
    ),
    Fault(
        "a row that is swapped in lacks its newest token", "engine/cache_manager.py",
        "seq.length, seq.sampled, seq.fresh = swapped.length, swapped.sampled, False",
        "seq.length, seq.sampled, seq.fresh = swapped.length - 1, swapped.sampled, False",
        ("engine",),
    ),
    Fault(
        "known tokens are reported again", "engine/handle.py",
        "count, known = int(output.count[place]) - before, max(len(handle.generated) - before, 0)",
        "count, known = int(output.count[place]) - before, 0", ("engine",),
    ),
    Fault(
        "tokens that are computed again are sampled again", "engine/rows.py",
        "known = self.handle.generated[self.sampled : self.sampled + rounds]",
        "known = [][self.sampled : self.sampled + rounds]", ("engine",),
    ),
    Fault(
        "the pages of a finished request are not freed", "engine/rows.py",
        "                pool.release(page)",
        "                pool.refs[page] -= 0", ("engine",),
    ),
    Fault(
        "a shared page is not counted", "engine/rows.py",
        "                pool.retain(page)",
        "                pool.refs[page] += 0", ("engine",),
    ),
    Fault(
        "a window's page is freed too early", "engine/rows.py",
        "return int(layout.filled(units)), int(layout.first_visible_page(units))",
        "return int(layout.filled(units)), int(layout.first_visible_page(units + 32))",
        ("engine",),
    ),
    Fault(
        "tenants share prefixes", "engine/scheduler.py",
        "namespace = Namespace(handle.request.tenant, self._cache_manager.weight_version, rows)",
        "namespace = Namespace(None, self._cache_manager.weight_version, rows)", ("engine",),
    ),
    Fault(
        "prefixes of other weights are shared", "engine/cache_manager.py",
        "        self.weight_version += 1",
        "        self.weight_version += 0", ("engine",),
    ),
    Fault(
        "a prefix that two sets of weights computed is cached", "engine/cache_manager.py",
        "        if not self._sharing or seq.namespace.weight_version != self.weight_version:",
        "        if not self._sharing:", ("engine",),
    ),
    Fault(
        "seeds do not reach the rows", "engine/rows.py",
        "            array[row] = new[0]",
        "            array[row] = new[0] * (new.dtype != np.uint32)", ("engine",),
    ),
    Fault(
        "a finished row's filters stay on", "engine/rows.py",
        "        self._write(row, self._neutral)",
        "        del row", ("engine",),
    ),
    Fault(
        "a penalty lacks the request's prompt", "engine/cache_manager.py",
        "            self._runner.set_history(seq.row, prompt)",
        "            self._runner.set_history(seq.row, [])", ("engine",),
    ),
    Fault(
        "arrays change after dispatch", "engine/rows.py",
        "params = self._on_device = commit(self._placement.put(copies))",
        "params = self._on_device = self._params", ("engine",),
    ),
    Fault(
        "a row that does not take part decodes", "engine/programs.py",
        "        return decoding & (step < inputs.rounds) & ~progress.done",
        "        return (inputs.lengths >= 0) & (step < 8) & ~progress.done", ("engine",),
    ),
    Fault(
        "a row keeps the high-water mark of an earlier request", "engine/programs.py",
        "    written = jnp.where(inputs.fresh[:, None], starts[:, None], written)",
        "    written = jnp.where(inputs.fresh[:, None], written, written)", ("engine",),
    ),
    Fault(
        "the oldest request is preempted", "engine/scheduler.py",
        "    return max(seqs, key=lambda seq: rank(seq.handle))",
        "    return min(seqs, key=lambda seq: rank(seq.handle))", ("engine",),
    ),
    Fault(
        "priorities are reversed", "engine/scheduler.py",
        "    return handle.request.priority, handle.number",
        "    return -handle.request.priority, handle.number", ("engine",),
    ),
    Fault(
        "deadlines are ignored", "engine/scheduler.py",
        "if deadline is not None and now - handle.times.submitted > deadline",
        "if deadline is not None and now - handle.times.submitted > 1e9", ("engine",),
    ),
    Fault(
        "a guide gives a mask before its last token is known", "engine/rows.py",
        "        if known > 0 or handle.in_flight:",
        "        if known > 0:", ("engine",),
    ),
    Fault(
        "attention depends on the other rows' lengths", "engine/programs.py",
        "        with ragged_batches(exact=exact):",
        "        if True:", ("engine",),
    ),
    Fault(
        "a window's high-water mark ignores freed pages", "engine/programs.py",
        "return jnp.where(raw, jnp.maximum(cache.written, ends[:, None]), cache.written)",
        "return jnp.where(raw, jnp.maximum(cache.written, 0), cache.written)", ("engine",),
    ),
    Fault(
        "swapped state stays on the device", "engine/cache_manager.py",
        "        self._transfers.append(swapped.finish_copy)",
        "        self._transfers.append(lambda: None)", ("engine",),
    ),
    Fault(
        "the partly full page of a beam is not copied", "engine/beams.py",
        "            keys, values = copy_pages(body, layer.orders, placement, sources, targets)",
        "            keys, values = body", ("engine_beams",),
    ),
    Fault(
        "pages that beams share are not counted", "engine/rows.py",
        "                    pool.retain(shared)", "                    pass",
        ("engine_beams",),
    ),
    Fault(
        "a search that starts over keeps old candidates", "engine/scheduler.py",
        "            seq.handle.beams.reset()", "            seq.handle.beams.active = [0]",
        ("engine_beams",),
    ),
    Fault(
        "requests of a failed program do not end", "engine/engine.py",
        "            self._fail(error)", "            del error", ("engine",),
    ),
    Fault(
        "a group's rows depend on the other rows' lengths", "attention/paths.py",
        "        return blockwise(inputs.take_rows(rows), even=True)",
        "        return blockwise(inputs.take_rows(rows))", ("engine",),
    ),
    Fault(
        "a shared page is taken for a row's own", "attention/paths.py",
        "(jnp.max(times) <= 1)", "(jnp.max(times) <= 9)", ("any_length",),
    ),
    Fault(
        "the check for non-finite values is removed", "attention/paths.py",
        "jnp.all(jnp.isfinite(partial.weighted))", "jnp.bool_(True)", ("any_length",),
    ),
    Fault(
        "rows are returned in the order of their lengths", "attention/paths.py",
        "jnp.zeros_like(inputs.queries).at[order].set(output)",
        "output[:batch]", ("any_length",),
    ),
    Fault(
        "the last block of an even loop is not attended to", "attention/blocks.py",
        "control_flow.fori_loop(0, -(-end // size), visit_block, partial)",
        "control_flow.fori_loop(0, end // size, visit_block, partial)", ("any_length",),
    ),
    Fault(
        "a stack is written in its first layer", "placement/writing.py",
        "index = jnp.stack([jnp.broadcast_to(layer, rows.shape), rows, origin], axis=1)",
        "index = jnp.stack([0 * rows, rows, origin], axis=1)", ("stacks",),
    ),
    Fault(
        "a single row of a stack is written in its first layer", "placement/order.py",
        "first = row if isinstance(row, tuple) else (row,)",
        "first = (0, row[1]) if isinstance(row, tuple) else (row,)", ("stacks",),
    ),
    Fault(
        "a stack is read in its first layer", "placement/order.py",
        "place[0], place[1 + self.axis] = layer, jnp.asarray(start * self.stride, jnp.int32)",
        "place[0], place[1 + self.axis] = 0 * layer, jnp.asarray(start * self.stride, jnp.int32)",
        ("stacks",),
    ),
    Fault(
        "pages of a stack are read in its first layer", "placement/pages.py",
        "leading = () if layer is None else (layer,)",
        "leading = () if layer is None else (0 * layer,)", ("stacks", "recompute"),
    ),
    Fault(
        "the tail of a long call is written in a stack's first layer", "cache/layer.py",
        "lambda x, y: lax.dynamic_update_index_in_dim(x, y, index, 0), arrays, new",
        "lambda x, y: lax.dynamic_update_index_in_dim(x, y, 0, 0), arrays, new",
        ("stacks", "recompute"),
    ),
    Fault(
        "a layer that a scan missed is not reported", "cache/appending.py",
        "status=cache.status | flag_where(other, MISSED_LAYER)",
        "status=cache.status | flag_where(other, 0)", ("stacks",),
    ),
    Fault(
        "the strip of a long call stays in the carry", "attention/step.py",
        "replace(layer, strip=None, strip_of=None) for layer in cache.layers",
        "replace(layer, low=layer.low) for layer in cache.layers", ("stacks",),
    ),
    Fault(
        "a long call reads another layer's strip", "attention/attend.py",
        "queries = jnp.where(valid, queries, jnp.nan)",
        "queries = jnp.where(valid, queries, queries)", ("stacks",),
    ),
    Fault(
        "layers with different high-water marks are stacked", "operations/stacks.py",
        "differ = jnp.any(written != written[:, :1], axis=1)",
        "differ = jnp.any(written < 0, axis=1)", ("stacks",),
    ),
    Fault(
        "a line that has a result is processed again", "cli/batch_command.py",
        "self.counts.skipped += 1",
        "self.counts.skipped += 1; self._write_error(number, key, None, ValueError())",
        ("batch_command",),
    ),
    Fault(
        "a partial line is taken for a complete one", "cli/batch_files.py",
        'value: Any = json.loads(raw) if raw.endswith(b"\\n") else None',
        "value: Any = json.loads(raw or b'0')", ("batch_command",),
    ),
    Fault(
        "a logits hook does not receive the newest token", "sampling/history.py",
        "set_at(self.tokens, at, token), self.length + taken.astype(jnp.int32)",
        "self.tokens, self.length + taken * (token >= 0)", ("scores",),
    ),
    Fault(
        "tokens are drawn from logits without the hook's changes", "generation/programs.py",
        "progress, past, logits, filters, sampling, limit, allowed=allowed",
        "progress, past, raw, filters, sampling, limit, allowed=allowed",
        ("scores",),
    ),
    Fault(
        "the unfiltered distribution is reported as the sampling distribution",
        "sampling/scores.py",
        "drawn = take_tokens(jax.nn.log_softmax(filtered, axis=-1), token)",
        "drawn = chosen + 0", ("scores",),
    ),
    Fault(
        "scored continuations are fed from their second token", "generation/scoring.py",
        "after, _ = _process(lm, kv_cache, [ids[:-1] for ids in new], chunk, last_only=False)",
        "after, _ = _process(lm, kv_cache, [ids[1:] for ids in new], chunk, last_only=False)",
        ("scores",),
    ),
    Fault(
        "a score ignores its temperature", "generation/scoring.py",
        "warm = logits / sampling.temperature[:, None]", "warm = logits / 1", ("scores",),
    ),
    Fault(
        "a rollout ignores its seed", "rollouts/program.py",
        "high = jnp.broadcast_to(jnp.asarray(high).astype(jnp.uint32), (rows,))",
        "high = jnp.zeros((rows,), jnp.uint32)", ("rollouts",),
    ),
    Fault(
        "a rollout's buffer is not reused", "rollouts/program.py",
        "keep_unused=True,  # the buffer's values are not used, only its memory",
        "keep_unused=False,", ("rollouts",),
    ),
    Fault(
        "a rollout stores new tokens one position too late", "rollouts/program.py",
        "where = jnp.where(real, lengths[:, None] + arange_row(new), width + new)",
        "where = jnp.where(real, lengths[:, None] + arange_row(new) + 1, width + new)",
        ("rollouts",),
    ),
    Fault(
        "parameters of other shapes are accepted", "generation/loaded_model.py",
        "if shape != expected:", "if len(shape) != len(expected):", ("adapters",),
    ),
    Fault(
        "rewindable tokens of a stack are not reduced over its layers", "operations/rows.py",
        "return most if layer.stack is None else jnp.min(most, axis=0)",
        "return most + 0", ("stacks",),
    ),
    Fault(
        "a ragged row's last logits are taken from its padding", "adapters/function_model.py",
        "at = jnp.clip(jnp.asarray(lengths, jnp.int32) - 1, 0, logits.shape[1] - 1)",
        "at = jnp.full_like(jnp.asarray(lengths, jnp.int32), logits.shape[1] - 1)",
        ("adapters",),
    ),
    Fault(
        "positions of a framework's layers always start at 0", "adapters/_running.py",
        "if call is None else call.positions", "if True else call.positions", ("frameworks",),
    ),
    Fault(
        "Linen passes no mask to attention", "adapters/_running.py",
        "return inspect.signature(self.own)",
        "return inspect.signature(lambda query, key, value: query)", ("frameworks",),
    ),
    Fault(
        "an unfinished call is accepted as a cache", "adapters/function_model.py",
        "if after.pending is not None:", "if False:", ("adapters",),
    ),
    Fault(
        "grouped queries use the wrong keys", "adapters/keras.py",
        "keys, values = (x[:, :, :: self.num_repeats] for x in (key, value))",
        "keys, values = (x[:, :, : x.shape[2] // self.num_repeats] for x in (key, value))",
        ("frameworks",),
    ),
    Fault(
        "the encoder's cache uses the decoder's window", "generation/encoder.py",
        "return [replace(each, layout=Dense()) for each in per_layer(choice, lm.config)]",
        "return list(per_layer(choice, lm.config))", ("sources",),
    ),
    Fault(
        "rows that share a source are mixed up with heads", "models/t5.py",
        "queries = queries.reshape(source.batch, each, heads, new, head_dim).swapaxes(1, 2)",
        "queries = queries.reshape(source.batch, heads, each, new, head_dim)", ("sources",),
    ),
    Fault(
        "the encoder attends to padding", "models/t5.py",
        "key_value_seq_lengths=lengths,",
        "key_value_seq_lengths=lengths * 0 + new,", ("sources",),
    ),
    Fault(
        "all pieces of a long text have the first piece's positions", "models/t5.py",
        "output = lax.map(attend_piece, (pieces, places.reshape(-1, PIECE)))",
        "output = lax.map(attend_piece, (pieces, places.reshape(-1, PIECE) % PIECE))", ("sources",),
    ),
    Fault(
        "experts with a negative weight are skipped", "models/moe.py",
        "return total + jnp.where(share[:, None] != 0, y, 0), None",
        "return total + jnp.where(share[:, None] > 0, y, 0), None", ("experts",),
    ),
    Fault(
        "proportional frequencies cover the rotated channels only", "models/config.py",
        'part = 1.0 if self.rope_type == "proportional" else self.partial_rotary_factor',
        "part = self.partial_rotary_factor", ("rope",),
    ),
    Fault(
        "a chat reuses one cached token too many", "chats/_conversation.py",
        "same = min(common_length(self.tokens, ids), len(ids) - 1)",
        "same = min(common_length(self.tokens, ids) + 1, len(ids) - 1)", ("chats",),
    ),
    Fault(
        "a stopped stream keeps a token too many", "generation/detokenizer.py",
        "del self.tokens[tokens:]",
        "del self.tokens[tokens + 1 :]", ("chats",),
    ),
    Fault(
        "the end token of an answer stays in the chat", "chats/_conversation.py",
        'answer_tokens = tokens[:-1] if reason == "eos" else tokens',
        "answer_tokens = list(tokens)", ("chats",),
    ),
    Fault(
        "penalties ignore earlier turns of a chat", "generation/session.py",
        "            request.row_sequences,",
        "            request.row_prompts,", ("chats",),
    ),
    Fault(
        "a frequency penalty counts the prompt", "sampling/sampler.py",
        "counts = count_tokens(tokens, length - count, length, logits.shape[1])",
        "counts = count_tokens(tokens, 0 * length, length, logits.shape[1])",
        ("sampling", "controls"),
    ),
    Fault(
        "repeated n-grams are detected one token too short", "sampling/filters.py",
        "return jnp.any(banned & (back < n))",
        "return jnp.any(banned & (back < n - 1))", ("sampling", "controls"),
    ),
    Fault(
        "typical sampling keeps the least surprising tokens", "sampling/filters.py",
        "return Ranking(_ordered(-jnp.abs(known - expected)), weights, p)",
        "return Ranking(_ordered(known - expected), weights, p)", ("sampling",),
    ),
    Fault(
        "a drawn token is not checked against the filters", "sampling/sampler.py",
        "return lax.cond(all_kept, lambda x: token, draw_exactly, logits)",
        "return lax.cond(True, lambda x: token, draw_exactly, logits)", ("sampling",),
    ),
    Fault(
        "a token at the probability limit is kept", "sampling/filters.py",
        "return self._above(mine) < self.limit", "return self._above(mine) <= self.limit",
        ("sampling",),
    ),
    Fault(
        "XTC excludes in every row", "sampling/filters.py",
        "dropped = set_at(top & (probabilities > least) & exclude[:, None], kept, False)",
        "dropped = set_at(top & (probabilities > least), kept, False)", ("sampling",),
    ),
    Fault(
        "XTC excludes end-of-text tokens", "sampling/sampler.py",
        "return exclude_top_choices(logits, sampling.xtc_threshold, rows, sampling.eos)",
        "return exclude_top_choices(logits, sampling.xtc_threshold, rows, sampling.eos[:, :0])",
        ("sampling",),
    ),
    Fault(
        "a draw with XTC checks only the most likely tokens", "sampling/sampler.py",
        "ruled_out = filters.xtc | (filters.top_p & filters.typical_p)",
        "ruled_out = filters.top_p & filters.typical_p", ("sampling",),
    ),
    Fault(
        "XTC decides by the noise of the draw", "sampling/sampler.py",
        "return jax.random.uniform(jax.random.fold_in(_draw_key(seed, count), 1), (), jnp.float32)",
        "return jax.random.uniform(_draw_key(seed, count), (), jnp.float32)", ("sampling",),
    ),
    Fault(
        "guide masks of draft tokens are one token late", "generation/guides/masks.py",
        "masks[place + 1] = guide_mask(ahead, masks.shape[1])",
        "masks[place + 1] = masks[place]", ("guided",),
    ),
    Fault(
        "guides miss the tokens of a draft", "generation/guides/masks.py",
        "for token in tokens[row, : counts[row] - self._counts[row]].tolist():",
        "for token in tokens[row, :1].tolist():", ("guided",),
    ),
    Fault(
        "a row's history has length 0", "engine/model_runner.py",
        "self.dispatch(programs.set_history, np.int32(row), padded, np.int32(len(tokens)))",
        "self.dispatch(programs.set_history, np.int32(row), padded, np.int32(0))", ("controls",),
    ),
    Fault(
        "a guide does not receive every token", "generation/guides/masks.py",
        "self._counts[row] += 1",
        "self._counts[row] += 2", ("guided",),
    ),
    Fault(
        "a moved beam overwrites one that stays", "generation/beams/step.py",
        "is_moved = ~has_child[:, None] & (free[:, None] == moved[None])",
        "is_moved = free[:, None] == moved[None]", ("beams",),
    ),
    Fault(
        "beams with the same parent share a guide", "generation/beams/session.py",
        "after[row] = guide.copy() if at in taken else guide",
        "after[row] = guide if at in taken else guide", ("guided", "beams"),
    ),
    Fault(
        "a beam's row keeps its old tokens", "operations/rows.py",
        "first, last = units(since), units(length)",
        "first, last = units(length), units(length)", ("beams",),
    ),
    Fault(
        "a search continues although no better sequence is possible", "generation/beams/step.py",
        "over = last | ~(reachable > worst) | (full & (params.early_stopping == 1))",
        "over = last | (full & (params.early_stopping == 1))", ("beams",),
    ),
    Fault(
        "the common prefix ignores finished beams",
        "generation/beams/streaming.py",
        "tokens = np.concatenate([live, past], axis=1)",
        "tokens = np.concatenate([live, live], axis=1)", ("beams",),
    ),
    Fault(
        "the caches of beams are not rewound to their common prefix",
        "generation/beams/streaming.py",
        "return beam, prefix_len, np.take_along_axis(fed, beam, axis=1) - prefix_len",
        "return beam, prefix_len, 0 * prefix_len", ("beams",),
    ),
    Fault(
        "draft tokens are accepted without verification", "generation/drafts/speculative.py",
        "accepting &= (place < lengths) & (after.token == proposed) & ~after.done",
        "accepting &= (place < lengths) & ~after.done", ("speculation",),
    ),
    Fault(
        "a rejected draft token stays in the cache", "generation/drafts/speculative.py",
        "return context.rewind(rejected), ",
        "return context.rewind(0 * rejected), ",
        ("speculation",),
    ),
    Fault(
        "the draft model's cache keeps rejected tokens", "generation/drafts/draft_model.py",
        "return context.rewind(jnp.maximum(context.cache.length - lengths, 0))",
        "return context.rewind(0 * lengths)", ("speculation",),
    ),
    Fault(
        "prompt lookup starts one token too early", "generation/drafts/draft_model.py",
        "return best, newest + 1",
        "return best, newest + 0", ("speculation",),
    ),
    Fault(
        "drafting never pauses", "generation/drafts/acceptance.py",
        "cooldown=lib.where(slower, cooldown, 0),",
        "cooldown=lib.where(slower, 0 * cooldown, 0),", ("speculation",),
    ),
    Fault(
        "a row's length ignores accepted tokens", "engine/rows.py",
        "self.verifying, self.length, self.sampled = 0, self.length + new, self.sampled + new",
        "self.verifying, self.length, self.sampled = 0, self.length + 1, self.sampled + new",
        ("engine_drafts",),
    ),
    Fault(
        "the draft model skips a token", "engine/speculative.py",
        "seq.draft_length = seq.length + 1",
        "seq.draft_length = seq.length + 2", ("engine_drafts",),
    ),
    Fault(
        "some rows draft and others do not", "engine/speculative.py",
        "verify_cost = 0.0 if sum(relative) < len(relative) else math.inf",
        "verify_cost = float(sum(relative) < 0)", ("engine_drafts",),
    ),
    Fault(
        "a row decodes while its draft is verified", "engine/rows.py",
        "if self.verifying:",
        "if self.verifying < 0:", ("engine_drafts",),
    ),
    Fault(
        "admission reserves pages that no row needs", "engine/cache_manager.py",
        "pages[number] += more or seq.handle.beams is not None",
        "pages[number] += True or seq.handle.beams is not None", ("engine",),
    ),
    Fault(
        "a search reports tokens that its guide forbids", "engine/programs.py",
        "among=jnp.where(params.search[:, None], allowed, ALL_ALLOWED),",
        "among=jnp.where(params.search[:, None] & False, allowed, ALL_ALLOWED),",
        ("engine_beams",),
    ),
    Fault(
        "files without text weights are downloaded", "models/files.py",
        "names = sorted({name for tensor, name in _places(folder).items() if not unused(tensor)})",
        "names = sorted({name for tensor, name in _places(folder).items()})", ("hub",),
    ),
    Fault(
        "numbers beyond float32 become infinite", "models/files.py",
        "if np.any(np.isinf(narrow) & ~np.isinf(values)):",
        "if np.any(np.isinf(narrow) & np.isinf(values)):", ("load",),
    ),
    Fault(
        "requests of several threads use a prefix tree at once", "generation/generator.py",
        "with nullcontext() if prefixes is None else prefixes.tree.lease_lock.acquire():",
        "with nullcontext():", ("prefixes",),
    ),
    Fault(
        "an unencodable character ends the command", "cli/output.py",
        'stream.reconfigure(errors="backslashreplace")', 'stream.reconfigure(errors="strict")',
        ("cli",),
    ),
    Fault(
        "a rollout compiles again for weakly typed parameters", "rollouts/program.py",
        "params = commit_like(without_weak_types(params), buffer)",
        "params = commit_like(params, buffer)", ("rollouts",),
    ),
    Fault(
        "a cleared tree holds its old pool and the new one", "prefixes/sequences.py",
        "        self._forget()  # first: the old pool and the new one may not fit together",
        "        pass", ("prefixes",),
    ),
    Fault(
        "sequences continue past the length of their rotary frequencies",
        "policies/model_config.py",
        "            return chosen, chosen",
        "            return chosen, None", ("rope",),
    ),
)  # fmt: skip


def planted(fault: Fault, folder: Path) -> None:
    """Plant a fault in a copy; the line must stand there once."""
    path = folder / "kvjax" / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.line) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has the line {text.count(fault.line)} times")
    path.write_text(text.replace(fault.line, fault.fault), encoding="utf-8")


class Caught(NamedTuple):
    """The test that noticed a fault, whether it is slow, and the seconds until it did."""

    test: str | None
    slow: bool
    seconds: float


def failing(folder: Path, files: list[str], workers: str, *, slow: bool) -> str | None:
    """The first test that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not oracle", "-n", workers]
    # tests/test_faults.py fails for every fault: it looks for the line.
    command += [
        "--hypothesis-profile=unshrunk",
        "-p",
        "no:cacheprovider",
        "--ignore=tests/test_faults.py",
    ]
    environment = {**os.environ, "KVJAX_SLOW": "only" if slow else "", "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            [*command, *files],
            cwd=folder,
            capture_output=True,
            text=True,
            env=environment,
            timeout=ENDLESS if files else None,
        )
    except subprocess.TimeoutExpired:
        return f"{files[0]} does not end"
    lines = done.stdout.splitlines()
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, NOTHING_TO_RUN) and not failed:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed[0] if failed else None


NOTHING_TO_RUN = 5
"""pytest's exit code if no test was selected."""
ENDLESS = 600
"""Seconds after which a fault's likeliest files count as failed: the fault made a loop endless."""


def tried(fault: Fault, workers: str, everything: bool) -> Caught:
    """Which test notices a fault."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "kvjax"
        left_out = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".pytest_cache", "*.egg*")
        shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
        planted(fault, folder)
        first = [f"tests/test_{each}.py" for each in fault.first]
        first = [file for file in first if (folder / file).exists()]
        # A slow test of the likeliest file is tried before all other files, which take minutes.
        rounds = [(first, False), (first, True)]
        rounds += [([], False), ([], True)] if everything else []
        for files, slow in rounds:
            test = failing(folder, files, workers, slow=slow)
            if test is not None:
                return Caught(test, slow, time.perf_counter() - start)
    return Caught(None, False, time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="faults with this in their name")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th fault, from number k on")
    parser.add_argument("--workers", default="auto", help="processes, as of pytest -n")
    parser.add_argument("--first", action="store_true", help="the likeliest files alone")
    given = parser.parse_args()
    number, parts = map(int, given.part.split("/"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp())
    quick = slow = missed = 0
    print("| fault | README's command | `.ci/run` | caught by | seconds |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for fault in [fault for fault in FAULTS if given.only in fault.name][number::parts]:
        caught = tried(fault, given.workers, not given.first)
        quick += caught.test is not None and not caught.slow
        slow += caught.slow
        missed += caught.test is None
        by_readme = "yes" if caught.test and not caught.slow else "no"
        by_ci = "yes" if caught.test else "**no**"
        test = (caught.test or "").removeprefix("tests/")
        print(
            f"| {fault.name} | {by_readme} | {by_ci} | `{test}` | {caught.seconds:.0f} |",
            flush=True,
        )
    print(f"\n{quick} caught by the README's command, {slow} more by .ci/run, {missed} by neither")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
