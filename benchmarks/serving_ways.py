"""Ways of serving requests of mixed lengths: batches of a few, an engine, Transformers' own."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvjax
from benchmarks.checkpoint import Sizes
from kvjax.memory import InferenceLimits


@dataclass(frozen=True)
class Work:
    """Requests: their prompts, and how many new tokens each asks for; `tokens`: slots of a cache
    that all ways have."""

    prompts: list[list[int]]
    new: list[int]
    tokens: int

    @property
    def total(self) -> int:
        """New tokens of all."""
        return sum(self.new)


def work_of(sizes: Sizes, given: argparse.Namespace) -> Work:
    """Lengths and tokens of any size between the limits, from a seed."""
    rng = np.random.default_rng(given.seed)
    lengths = rng.integers(given.prompt[0], given.prompt[1] + 1, given.requests)
    new = rng.integers(given.new[0], given.new[1] + 1, given.requests).tolist()
    prompts = [rng.integers(0, sizes.vocab_size, int(n)).tolist() for n in lengths]
    return Work(prompts, new, given.batch * (given.prompt[1] + given.new[1]))


def static(lm: Any, work: Work, batch: int, order: Sequence[int]) -> float:
    """Seconds of `generate`, without compiling: each batch goes on to the longest of its rows."""
    seconds = 0.0
    for start in range(0, len(order), batch):
        rows = list(order[start : start + batch])
        result = kvjax.generate(
            lm, [work.prompts[n] for n in rows], max_new_tokens=max(work.new[n] for n in rows),
            max_len=work.tokens // batch, eos_token_ids=(),
        )  # fmt: skip
        seconds += result.stats.prefill_seconds + result.stats.decode_seconds
    return seconds


def engine_of(
    lm: Any, work: Work, given: argparse.Namespace, *, ahead: int = 1, **changes: Any
) -> kvjax.Engine:
    """One with as many slots, in pages; ``ahead``: steps that it sends before others are done."""
    limits = InferenceLimits(
        max_batch_size=given.rows, max_seq_len=work.tokens // given.batch, prefetch_steps=ahead
    )
    settings = {
        "pages": work.tokens // given.page, "prefill_chunk": given.chunk, "batch_invariant": False,
        "max_num_batched_tokens": given.chunks * given.chunk + given.rows,
    }  # fmt: skip
    policy = kvjax.policy("paged", page_size=given.page)
    engine = kvjax.Engine(lm, policy, limits, **settings | changes)
    engine.compile()
    return engine


def continuous(
    lm: Any, work: Work, given: argparse.Namespace, batch_invariant: bool
) -> dict[str, Any]:
    """Seconds of an engine, and what they went to."""
    engine, start = engine_of(lm, work, given, batch_invariant=batch_invariant), time.perf_counter()
    both = zip(work.prompts, work.new, strict=True)
    handles = [engine.submit(p, max_new_tokens=n, eos_token_ids=()) for p, n in both]
    while engine.step():
        pass
    seconds, stats = time.perf_counter() - start, engine.stats()
    assert [len(handle.tokens) for handle in handles] == work.new
    first = [(each.times.first_token or 0) - each.times.submitted for each in handles]
    return {
        "seconds": seconds, "steps": stats.steps, "padding": stats.padding_tokens,
        "preemptions": stats.preemptions, "first_token": statistics.median(first),
        "tokens": [handle.tokens for handle in handles],
    }  # fmt: skip


def host_share(lm: Any, work: Work, given: argparse.Namespace) -> float:
    """The part of a step that the host takes, where it waits for each: nothing is sent ahead. Of
    steps of the default size, for what waits in a device's queue would count as the host's."""
    engine = engine_of(lm, work, given, ahead=0, max_num_batched_tokens=None)
    for prompt, new in zip(work.prompts, work.new, strict=True):
        engine.submit(prompt, max_new_tokens=new, eos_token_ids=())
    while engine.step():
        pass
    stats = engine.stats()
    return stats.host_seconds / (stats.host_seconds + stats.waiting_seconds)


def transformers(folder: str, work: Work, given: argparse.Namespace) -> dict[str, Any] | None:
    """Seconds of Transformers' continuous batching, with as many slots; None without it."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers as peer  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    peer.logging.set_verbosity_error()
    model = peer.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    settings = peer.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
    batching = peer.generation.configuration_utils.ContinuousBatchingConfig(
        page_size=given.page, num_blocks=work.tokens // given.page,
        max_batch_tokens=given.chunks * given.chunk, max_requests_per_batch=given.rows,
    )  # fmt: skip
    found: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=batching
    ) as manager:
        # Whatever it makes at first.
        manager.add_request(work.prompts[0], "first", max_new_tokens=1)
        assert next(iter(manager)).request_id == "first"
        start = time.perf_counter()
        for number, (prompt, new) in enumerate(zip(work.prompts, work.new, strict=True)):
            manager.add_request(prompt, str(number), max_new_tokens=new)
        for result in manager:
            if result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
            if len(found) == len(work.prompts):
                break
        seconds = time.perf_counter() - start
    tokens = [found[str(n)] for n in range(len(found))]
    assert [len(each) for each in tokens] == work.new
    return {"seconds": seconds, "tokens": tokens, "version": peer.__version__}


def first_tokens(lm: Any, sizes: Sizes, given: argparse.Namespace) -> dict[str, float]:
    """Milliseconds to the first token behind a beginning that others had, shared and not."""
    rng, found = np.random.default_rng(given.seed + 1), {}
    beginning = rng.integers(0, sizes.vocab_size, given.shared).tolist()
    work = Work([], [], given.batch * (given.prompt[1] + given.new[1]))
    for name, sharing in (("shared", True), ("alone", False)):
        engine, times = engine_of(lm, work, given, prefix_cache=sharing), []
        for _ in range(given.rounds + 1):
            own = rng.integers(0, sizes.vocab_size, given.own).tolist()
            handle = engine.submit([*beginning, *own], max_new_tokens=1)
            start = time.perf_counter()
            while not handle.done:
                engine.step()
            times.append(1e3 * (time.perf_counter() - start))
        found[name] = statistics.median(times[1:])
    return found
