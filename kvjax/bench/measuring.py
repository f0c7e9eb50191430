"""Decode and prefill, timed on the device at hand: by batch, length of the prompt, and policy.

How each figure is gained. Every policy has two caches of one capacity, made by ``init_cache`` and
grown at once to what the longest text needs: one holds a prompt of random tokens, the other a
single token. In each repeat the policies follow one another, each repeat beginning with the next
one; the first round compiles and is not counted. A run is ``steps`` steps, after which
``kvjax.rewind`` takes the cache back; it is waited for once, at its end. Figures are medians.

- A *step*: a run of the decode loop of ``kvjax.generate`` behind the prompt, in one dispatch, over
  its steps.
- *sampling*: that, less a loop that ends in logits and feeds tokens that depend on no logits.
- *attention*: that loop behind the prompt, less the same program behind the single token: what the
  prompt adds. The first block, and what does not grow with the text, stay with the weights.
- *weights*: that loop behind the single token.
- *overhead*: the decode loop asked for one step at a time, dispatched from Python one after the
  other without waiting, less a step: what a loop on the device saves. No part of a step.

Differences are taken within a repeat, and the median of them is shown, so the middle three add up
to a step but for the medians. One below nothing is shown as 0 if it is no larger than the range it
had over the repeats, for that is noise; otherwise as it was measured.

- *Bytes of a step*: every weight once, but of tables that are looked up in only the rows of a step;
  and the part of the cache that the middle step of a run sees, as its codecs store it.
- *Prefill*: the chunks that ``generate`` would feed, up to the last logits.
- *Compile seconds*: tracing, lowering and compiling, or reading from JAX's persistent cache, in the
  first round. Of policies that share programs the first has them all.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import numpy as np

from kvjax.bench.bandwidth import Bandwidth, measure_bandwidth, peak_memory
from kvjax.bench.timing import PolicyTimer, difference
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.validation import as_int
from kvjax.generation.encoder import refuse_encoder
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.options import explicit_signature
from kvjax.generation.programs import MAX_STEPS
from kvjax.memory.sizes import cache_bytes_read, weight_bytes_read
from kvjax.policies.model_config import position_limit
from kvjax.policies.presets import PolicyChoice
from kvjax.sampling.params import SamplingKeywords


@dataclass(frozen=True)
class Split:
    """Milliseconds of a step, by difference; ``overhead`` is beside it."""

    weights: float
    attention: float
    sampling: float
    overhead: float


@dataclass(frozen=True)
class Cell:
    """A policy behind prompts of one length.

    ``ms``: of a step, all rows together, over runs of ``steps``, and each of them in ``every_ms``.
    ``weight_bytes`` and ``cache_bytes``: that a step must read; ``bandwidth``: these over its time,
    bytes a second; ``of_read``: to the device's. ``capacity``: tokens of the cache, and
    ``allocated`` its bytes, by place. ``prefill_ms``: of all rows' prompts, None if not asked for.
    """

    batch: int
    prompt: int
    policy: str
    steps: int
    ms: float
    every_ms: tuple[float, ...]
    tokens_per_second: float
    weight_bytes: int
    cache_bytes: int
    bandwidth: float
    of_read: float
    split: Split
    prefill_ms: float | None
    prefill_tokens_per_second: float | None
    capacity: int
    allocated: dict[str, int]
    compile_seconds: float
    compilations: int


@dataclass(frozen=True)
class Bench:
    """All cells, by batch, prompt and policy, and the device that they were measured on.

    ``left_out``: a sentence for each prompt that the model is not made for. ``peak_bytes``: the
    most memory ever in use since the process began, with two caches for each policy, of what
    ``peak_of`` says: the device's, or the resident set of the process; None if neither is told.
    """

    device: str
    platform: str
    jax: str
    dtype: str
    bandwidth: Bandwidth
    cells: tuple[Cell, ...]
    left_out: tuple[str, ...]
    peak_bytes: int | None
    peak_of: str


@explicit_signature(SamplingKeywords)
@without_mesh_context
def measure(
    lm: LanguageModel,
    policies: Mapping[str, PolicyChoice],
    *,
    prompts: Sequence[int] = (64, 512, 2048),
    batches: Sequence[int] = (1,),
    steps: int = 32,
    repeats: int = 5,
    prefill: bool = True,
    bandwidth: Bandwidth | None = None,
    told: Callable[[str], Any] | None = None,
    **drawing: Unpack[SamplingKeywords],
) -> Bench:
    """Time decoding and prefill.

    Args:
      lm: the model, as it is loaded.
      policies: of caches, as for ``init_cache``, by name.
      prompts, batches: lengths in tokens, and numbers of rows.
      steps: of a run, at most 128; fewer where a cache can't forget so many (``rewind``), and then
        for all policies of that cell.
      repeats, prefill: how often everything is timed, and whether prefill is timed too.
      bandwidth: of the device; by default it is measured, last.
      told: called with a line about each cell before it is measured.
      drawing: ``temperature``, ``top_k``, ``top_p``, ``min_p``, as in ``kvjax.generate``.

    Raises:
      ValueError: if there is no policy, a number is out of its range, the model is made for none of
        the prompts, or a ring has no slack to take a step back.
      NonFiniteError: if the model gives logits that are not finite.
    """
    if not policies:
        raise ValueError("no policies: there is nothing to measure")
    refuse_encoder("a measurement", lm)
    prompts, batches = _numbers("prompts", prompts), _numbers("batches", batches)
    if as_int("steps", steps, 1) > MAX_STEPS:
        raise ValueError(f"steps is {steps}: a dispatch of the decode loop has at most {MAX_STEPS}")
    as_int("repeats", repeats, 1)
    fitting, left_out = _fitting(lm.config, prompts, steps)
    names = list(policies)
    found: list[tuple[str, PolicyTimer]] = []
    for batch, prompt in itertools.product(batches, fitting):
        if told is not None:
            told(f"{batch} x {prompt:,} tokens")
        shape, drawn = (batch, prompt), np.random.default_rng(prompt)
        tokens = drawn.integers(0, lm.config.vocab_size, shape, np.int32)
        timed = {name: PolicyTimer(lm, policies[name], tokens, steps, drawing) for name in names}
        most = min(each.max_rewind for each in timed.values())
        if most < 1:
            raise ValueError("a ring without slack can't take back a step: give it slack=")
        for each in timed.values():
            each.steps = most
        for repeat in range(repeats + 1):
            first = repeat % len(names)
            for name in names[first:] + names[:first]:
                timed[name].run(counted=repeat > 0, prefill=prefill)
        for each in timed.values():
            each.drop()
        found += timed.items()
    # Before the bandwidth is measured: its arrays are no part of what a cache needs.
    peak, peak_of = peak_memory()
    bandwidth = measure_bandwidth() if bandwidth is None else bandwidth
    cells = tuple(_cell(lm, bandwidth.read, *each) for each in found)
    device = jax.local_devices()[0]
    return Bench(
        device.device_kind, device.platform, jax.__version__, str(lm.config.dtype), bandwidth,
        cells, left_out, peak, peak_of,
    )  # fmt: skip


def _cell(lm: LanguageModel, read: float, name: str, timed: PolicyTimer) -> Cell:
    (batch, prompt), capacity = timed.shape, timed.request.capacity
    seconds, steps = timed.seconds, timed.steps
    whole = statistics.median(seconds["whole"])
    weights = weight_bytes_read(lm.params, batch)
    cache = cache_bytes_read(
        lm.config, timed.request.policy, batch=batch, max_len=capacity,
        length=prompt + (steps + 1) // 2,
    )  # fmt: skip
    prefill = statistics.median(seconds["prefill"]) if seconds["prefill"] else None
    return Cell(
        batch, prompt, name, steps,
        ms=1000 * whole,
        every_ms=tuple(1000 * each for each in seconds["whole"]),
        tokens_per_second=batch / whole,
        weight_bytes=weights,
        cache_bytes=cache,
        bandwidth=(weights + cache) / whole,
        of_read=(weights + cache) / whole / read,
        split=Split(
            weights=1000 * statistics.median(seconds["first"]),
            attention=difference(seconds["logits"], seconds["first"]),
            sampling=difference(seconds["whole"], seconds["logits"]),
            overhead=difference(seconds["single"], seconds["whole"]),
        ),
        prefill_ms=None if prefill is None else 1000 * prefill,
        prefill_tokens_per_second=None if prefill is None else batch * prompt / prefill,
        capacity=capacity,
        allocated=timed.allocated,
        compile_seconds=timed.meter.compile_seconds,
        compilations=timed.meter.compilations,
    )  # fmt: skip


def _numbers(name: str, given: Sequence[int]) -> list[int]:
    """Whole numbers, at least 1, each once."""
    found = list(dict.fromkeys(as_int(name, number, 1) for number in given))
    if not found:
        raise ValueError(f"no {name}: there is nothing to measure")
    return found


def _fitting(config: Any, prompts: list[int], steps: int) -> tuple[list[int], tuple[str, ...]]:
    """The prompts that a model is made for, and a sentence for each of the others."""
    positions = position_limit(config)
    context = getattr(config, "max_position_embeddings", None)
    fitting, left_out = [], []
    for prompt in prompts:
        if positions is not None and prompt + steps > positions:
            why = f"with {steps} steps it would pass the model's {positions:,} positions"
        elif context is not None and prompt > context:
            why = f"the model was made for texts of {context:,}"
        else:
            fitting.append(prompt)
            continue
        left_out.append(f"a prompt of {prompt:,} tokens is left out: {why}")
    if not fitting:
        raise ValueError(f"there is nothing to measure: {left_out[0]}")
    return fitting, tuple(left_out)
