"""Decode and prefill times on the current device, by batch, prompt and policy, and their tables.

Method. Every policy has two caches of the same capacity, grown in advance to the longest sequence.
One holds a prompt of random tokens, the other a single token. Each repeat measures all policies in
turn. The order rotates, so that each repeat starts with a different policy. The first repeat
compiles and is not counted. A run is ``steps`` decode steps, a wait until they have finished, and
``kvjax.rewind``. All numbers are medians over repeats.

- *step*: a step of the decode loop of ``kvjax.generate`` after the prompt. One dispatch runs all
  steps.
- *sampling*: a step, minus a step of a second loop that does not sample: its tokens do not depend
  on the logits.
- *attention*: a step of the second loop after the prompt, minus a step of it after a single token.
  This is the time that the prompt adds. The first block, and costs that do not grow with the
  length, count as weights.
- *weights*: a step of the second loop after a single token.
- *overhead*: a step if each step is dispatched from Python without waiting, minus a step. It is the
  time that the loop on the device saves, so it is not a part of a step.

Differences are computed within a repeat before the median, so the parts add up to a step only
approximately. A negative difference is reported as 0 if its size is at most the spread of the
repeats. Otherwise it is reported as measured.

- *bytes of a step*: the bytes of all weights, and of the part of the stored cache that the middle
  step of a run sees. From lookup tables, only one row per row of the batch is counted.
- *prefill*: the prefill chunks of ``generate``, until the last logits are computed.
- *compile seconds*: tracing, lowering and compiling, or loading from JAX's persistent cache, in the
  first repeat. If policies share programs, the time counts for the first policy.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from kvjax.bench.timing import Bandwidth, PolicyTimer, difference, measure_bandwidth, peak_memory
from kvjax.core.array_folder import expand_user
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.reporting import pyplot, readable_bytes
from kvjax.core.validation import ArgumentError, as_int
from kvjax.generation.encoder import refuse_encoder
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.options import explicit_signature
from kvjax.generation.programs import MAX_STEPS
from kvjax.memory.sizes import cache_bytes_read, weight_bytes_read
from kvjax.policies.model_config import position_limit
from kvjax.policies.presets import PolicyChoice
from kvjax.sampling.params import SamplingKeywords, prepare_sampling


@dataclass(frozen=True)
class Split:
    """Milliseconds of the parts of a step. ``weights`` is a step after a single token, and
    ``attention`` and ``sampling`` are what the prompt's length and the choice of a token add.
    ``overhead``, which is not a part of the step, is what it costs to dispatch steps one by one.

    Example:
      ```python
      bench = kvjax.bench.measure(lm, {"static": "static"}, prompts=[16], steps=4, repeats=1)
      print(bench.cells[0].split.weights, bench.cells[0].split.attention)
      ```
    """

    weights: float
    attention: float
    sampling: float
    overhead: float


@dataclass(frozen=True)
class Cell:
    """Results of one policy for one batch size and prompt length.

    Attributes:
      batch: number of rows.
      prompt: number of prompt tokens per row.
      policy: name of the policy.
      steps: number of steps per run.
      ms: median milliseconds of a step, which decodes one token in every row.
      ms_per_run: milliseconds of a step in each run.
      tokens_per_second: tokens of all rows per second.
      weight_bytes, cache_bytes: bytes of weights and of the cache that a step must read.
      bandwidth: bytes per second that steps read, of weights and cache together.
      bandwidth_fraction: ``bandwidth`` divided by the device's read bandwidth.
      split: the milliseconds that weights, attention and sampling add to a step.
      prefill_ms: milliseconds to prefill the prompts of all rows; None if not measured.
      prefill_tokens_per_second: prompt tokens of all rows per second; None if not measured.
      capacity: tokens per row of the cache.
      allocated: bytes of the cache, by place (device or host).
      compile_seconds, compilations: seconds and number of compilations in the first repeat.

    Example:
      ```python
      bench = kvjax.bench.measure(lm, {"static": "static"}, prompts=[16], steps=4, repeats=1)
      for cell in bench.cells:
          print(cell.policy, cell.batch, cell.prompt, cell.ms, cell.bandwidth_fraction)
      ```
    """

    batch: int
    prompt: int
    policy: str
    steps: int
    ms: float
    ms_per_run: tuple[float, ...]
    tokens_per_second: float
    weight_bytes: int
    cache_bytes: int
    bandwidth: float
    bandwidth_fraction: float
    split: Split
    prefill_ms: float | None
    prefill_tokens_per_second: float | None
    capacity: int
    allocated: dict[str, int]
    compile_seconds: float
    compilations: int


@dataclass(frozen=True)
class Bench:
    """Results for all batches, prompts and policies on a device.

    Attributes:
      device, platform: the device and its platform.
      jax: JAX's version.
      dtype: the model's dtype.
      bandwidth: the device's memory bandwidth, in bytes per second.
      cells: one result for each combination of batch size, prompt length and policy.
      skipped: one sentence for each prompt length that is too long for the model.
      peak_bytes: peak memory use since the process started, or None if unknown. The measurement
        holds two caches per policy.
      peak_source: where ``peak_bytes`` was counted: ``"device"`` or ``"process"``.

    Example:
      ```python
      bench = kvjax.bench.measure(lm, {"static": "static"}, prompts=[16], steps=4, repeats=1)
      print(bench.device, bench.bandwidth.read, bench.peak_bytes)
      ```
    """

    device: str
    platform: str
    jax: str
    dtype: str
    bandwidth: Bandwidth
    cells: tuple[Cell, ...]
    skipped: tuple[str, ...]
    peak_bytes: int | None
    peak_source: str


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
    callback: Callable[[str], Any] | None = None,
    **drawing: Unpack[SamplingKeywords],
) -> Bench:
    """Measure decode and prefill times.

    Args:
      lm: the model.
      policies: cache policies by name, as for ``init_cache``.
      prompts: prompt lengths in tokens.
      batches: batch sizes (numbers of rows).
      steps: steps per run, at most 128. If one cache cannot be rewound that far, all policies use
        fewer steps for that batch and prompt.
      repeats: how many times every run is timed.
      prefill: whether to time prefill.
      bandwidth: the device's bandwidth; by default it is measured after everything else.
      callback: a function that is called with a line of text before each batch size and prompt
        length.
      {sampling parameters}

    Raises:
      ValueError: if ``policies`` is empty, a number is out of range, all prompts are too long for
        the model, or a ring has no slack (slots in addition to its window), so that a step can't be
        rewound.
      NonFiniteError: if the model returns logits that are not finite.

    Example:
      ```python
      bench = kvjax.bench.measure(lm, {"static": "static"}, prompts=[16], steps=4, repeats=1)
      print(bench.cells[0].ms, bench.cells[0].tokens_per_second)
      ```
    """
    if not policies:
        raise ValueError("no policies to measure")
    refuse_encoder("a measurement", lm)
    prompts, batches = _numbers("prompts", prompts), _numbers("batches", batches)
    if as_int("steps", steps, 1) > MAX_STEPS:
        raise ArgumentError(f"steps must be at most {MAX_STEPS}, got {steps}", param="steps")
    as_int("repeats", repeats, 1)
    prepare_sampling(seeds=[0], **drawing)
    fitting, left_out = _fitting(lm.config, prompts, steps)
    names = list(policies)
    timers: list[tuple[str, PolicyTimer]] = []
    for batch, prompt in itertools.product(batches, fitting):
        if callback is not None:
            callback(f"{batch} x {prompt:,} tokens")
        shape, drawn = (batch, prompt), np.random.default_rng(prompt)
        tokens = drawn.integers(0, lm.config.vocab_size, shape, np.int32)
        timed = {name: PolicyTimer(lm, policies[name], tokens, steps, drawing) for name in names}
        most = min(timer.max_rewind for timer in timed.values())
        if most < 1:
            raise ValueError("a ring without slack can't rewind a step: give it slack=")
        for timer in timed.values():
            timer.steps = most
        for repeat in range(repeats + 1):
            first = repeat % len(names)
            for name in names[first:] + names[:first]:
                timed[name].run(counted=repeat > 0, prefill=prefill)
        for timer in timed.values():
            timer.drop()
        timers += timed.items()
    # Read the peak before measuring the bandwidth, whose arrays are not part of the cache.
    peak, peak_source = peak_memory()
    bandwidth = measure_bandwidth() if bandwidth is None else bandwidth
    cells = tuple(_cell(lm, bandwidth.read, name, timer) for name, timer in timers)
    device = jax.local_devices()[0]
    return Bench(
        device.device_kind,
        device.platform,
        jax.__version__,
        str(lm.config.dtype),
        bandwidth,
        cells,
        left_out,
        peak,
        peak_source,
    )


def _cell(lm: LanguageModel, read: float, name: str, timed: PolicyTimer) -> Cell:
    (batch, prompt), capacity = timed.shape, timed.request.capacity
    seconds, steps = timed.seconds, timed.steps
    whole = statistics.median(seconds["whole"])
    weights = weight_bytes_read(lm.params, batch)
    cache = cache_bytes_read(
        lm.config,
        timed.request.policy,
        batch=batch,
        max_len=capacity,
        length=prompt + (steps + 1) // 2,
    )
    prefill = statistics.median(seconds["prefill"]) if seconds["prefill"] else None
    return Cell(
        batch,
        prompt,
        name,
        steps,
        ms=1000 * whole,
        ms_per_run=tuple(1000 * s for s in seconds["whole"]),
        tokens_per_second=batch / whole,
        weight_bytes=weights,
        cache_bytes=cache,
        bandwidth=(weights + cache) / whole,
        bandwidth_fraction=(weights + cache) / whole / read,
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
    )


def _numbers(name: str, values: Sequence[int]) -> list[int]:
    """Check that ``values`` are positive integers, and return them without duplicates."""
    numbers = list(dict.fromkeys(as_int(name, number, 1) for number in values))
    if not numbers:
        raise ValueError(f"no {name} to measure")
    return numbers


def _fitting(config: Any, prompts: list[int], steps: int) -> tuple[list[int], tuple[str, ...]]:
    """Return the prompt lengths that fit in a model, and a sentence for each length that does
    not."""
    positions = position_limit(config)
    context = getattr(config, "max_position_embeddings", None)
    fitting, left_out = [], []
    for prompt in prompts:
        if positions is not None and prompt + steps > positions:
            why = f"with {steps} steps it exceeds the model's {positions:,} positions"
        elif context is not None and prompt > context:
            why = f"the model was trained for {context:,} tokens"
        else:
            fitting.append(prompt)
            continue
        left_out.append(f"a prompt of {prompt:,} tokens is left out: {why}")
    if not fitting:
        raise ValueError(f"nothing to measure: {left_out[0]}")
    return fitting, tuple(left_out)


# Colors for color-blind readers (Okabe and Ito).
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "os^Dv<>"


def decode_rows(bench: Bench) -> list[list[str]]:
    """Make a table with a heading and one row per result: the time of a step, the bytes that it
    reads, and the bandwidth."""
    head = ["batch x prompt", "policy", "ms a step", "tokens/s", "weights read", "cache read",
            "bandwidth", "of read"]  # fmt: skip
    rows = [
        [
            _place(cell), cell.policy, f"{cell.ms:.3g}", f"{cell.tokens_per_second:,.1f}",
            readable_bytes(cell.weight_bytes), readable_bytes(cell.cache_bytes),
            f"{readable_bytes(cell.bandwidth)}/s", f"{100 * cell.bandwidth_fraction:.0f} %",
        ]
        for cell in bench.cells
    ]  # fmt: skip
    return [head, *rows]


def part_rows(bench: Bench) -> list[list[str]]:
    """Make a table with a heading and one row per result: the parts of a step, prefill times and
    compile times."""
    head = ["batch x prompt", "policy", "weights", "attention", "sampling", "+ overhead",
            "prefill ms", "tokens/s", "compile s"]  # fmt: skip
    rows = [
        [
            _place(cell), cell.policy, *map(_part, astuple(cell.split)),
            _known(cell.prefill_ms, ".4g"), _known(cell.prefill_tokens_per_second, ",.0f"),
            f"{cell.compile_seconds:.1f}",
        ]
        for cell in bench.cells
    ]  # fmt: skip
    return [head, *rows]


def _part(milliseconds: float) -> str:
    """Format the milliseconds of a part. Parts are noisy differences, so a negative one becomes a
    dash."""
    return f"{milliseconds:.3g}" if milliseconds >= 0 else "–"


def device_line(bench: Bench) -> str:
    """Return a line of text with the device's bandwidth and the peak memory use."""
    speed = bench.bandwidth
    read, copied = readable_bytes(speed.read), readable_bytes(speed.copy)
    words = f"this device reads {read}/s and copies {copied}/s"
    if bench.peak_bytes is None:
        return words
    return f"{words}; peak memory of the {bench.peak_source} {readable_bytes(bench.peak_bytes)}"


def plot(bench: Bench, path: Path, *, title: str = "") -> None:
    """Plot milliseconds per step against prompt length, and bandwidth against bytes.

    Each policy and batch has a line.
    """
    plt = pyplot()
    figure, (time, roof) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    cells = sorted(bench.cells, key=lambda cell: cell.prompt)
    batches = dict.fromkeys(cell.batch for cell in bench.cells)
    policies = dict.fromkeys(cell.policy for cell in bench.cells)
    for (b, batch), (p, policy) in itertools.product(enumerate(batches), enumerate(policies)):
        line = [cell for cell in cells if (cell.batch, cell.policy) == (batch, policy)]
        style: Any = {
            "color": _COLORS[p % len(_COLORS)],
            "marker": _MARKERS[b % len(_MARKERS)],
            "linestyle": ("-", "--", ":", "-.")[b % 4],
            "label": f"{policy}, batch {batch}",
        }
        time.plot([cell.prompt for cell in line], [cell.ms for cell in line], **style)
        read = [(cell.weight_bytes + cell.cache_bytes) / 1e6 for cell in line]
        roof.plot(read, [cell.bandwidth / 1e9 for cell in line], **style)
    prompts = sorted({cell.prompt for cell in bench.cells})
    ceiling = bench.bandwidth.read / 1e9
    roof.axhline(ceiling, color="#777777", linestyle=":")
    roof.annotate(
        f"reading, {ceiling:.3g} GB/s",
        (0.02, ceiling),
        xycoords=("axes fraction", "data"),
        xytext=(0, -10),
        textcoords="offset points",
        fontsize=8,
        color="#555555",
    )
    time.set_xscale("log", base=2)
    for axes in (time, roof):
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
        axes.margins(x=0.1, y=0.15)
        axes.tick_params(which="both", labelsize=8)
    roof.set_xscale("log")
    for axis in (time.yaxis, roof.yaxis, roof.xaxis):
        axis.set_major_formatter(_tick)
        axis.set_minor_formatter(_tick)
    time.set_xticks(prompts, [f"{prompt:,}" for prompt in prompts])
    time.xaxis.set_minor_formatter("")
    time.set(xlabel="tokens of the prompt", ylabel="milliseconds per step")
    roof.set(xlabel="megabytes that a step must read", ylabel="GB/s reached")
    time.legend(fontsize=8)
    figure.suptitle(f"{title} in {bench.dtype} on {bench.device}", fontsize=11)
    figure.savefig(expand_user(path), dpi=150)
    plt.close(figure)


def _tick(value: float, _: int | None) -> str:
    """Return the label of a tick at 1, 2 or 5 of a decade. Other ticks have no label, because
    labels would overlap."""
    return f"{value:,.4g}" if f"{value:e}"[0] in "125" else ""


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _place(cell: Cell) -> str:
    return f"{cell.batch} x {cell.prompt:,}"
