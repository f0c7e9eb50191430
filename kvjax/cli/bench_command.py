"""``kvjax bench``: how fast a model decodes on this device, and which parts take the time."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Annotated, cast

import jax
import typer

from kvjax.cli import options
from kvjax.cli.common import check_dtype, known_shape, use_compilation_cache
from kvjax.cli.output import echo_json, show_progress
from kvjax.core.reporting import readable_bytes
from kvjax.generation.loaded_model import LanguageModel
from kvjax.memory.limits import device_memory
from kvjax.memory.shapes import ModelShape
from kvjax.memory.sizes import weight_bytes
from kvjax.placement.device import Device
from kvjax.policies.model_config import layer_windows
from kvjax.policies.presets import parse_policy
from kvjax.sampling.params import SamplingKeywords


def bench(
    *,
    model: options.Model = None,
    revision: options.Revision = None,
    shape: options.KnownShape = None,
    dtype: options.Dtype = None,
    batch: Annotated[
        str, typer.Option("--batch", "-b", help="Batch sizes, separated by commas: 1,8.")
    ] = "1",
    prompt: Annotated[
        str,
        typer.Option("--prompt", "-p", help="Prompt lengths in tokens, separated by commas."),
    ] = "64,512,2048",
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy, as NAME or NAME,SETTING=VALUE,...; several separated by commas, or "
            "repeated."
        ),
    ] = None,
    quantization: options.Quantization,
    sliding_window: options.SlidingWindow,
    drawing: options.DrawOptions,
    steps: Annotated[int, typer.Option(help="Steps to time together, at most 128.")] = 32,
    repeats: Annotated[int, typer.Option(help="Repeats; the median is shown.")] = 5,
    prefill: Annotated[bool, typer.Option(help="Time prefill too.")] = True,
    plot: Annotated[
        Path | None, typer.Option(help="Plot time and bandwidth into this file (png, svg).")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Time decoding and prefill on this device, by batch size, prompt length and cache policy."""
    use_compilation_cache()
    from kvjax import models
    from kvjax.bench import measure, measuring
    from kvjax.quality import reports

    if shape is not None and (model is not None or revision is not None):
        raise ValueError("give either --model (with its --revision) or --shape")
    settings = quantization.settings() | sliding_window.settings()
    suffix = "".join(f",{name}={value}" for name, value in settings.items() if value is not None)
    policies = {name + suffix: parse_policy(name + suffix) for name in _split_policies(cache)}
    if plot is not None:
        reports.pyplot()  # raises early if matplotlib is missing
    batches, prompts = _integers("--batch", batch), _integers("--prompt", prompt)
    if shape is None:
        with show_progress("loading"):
            lm = models.load(model, dtype=dtype, revision=revision)
    else:
        with show_progress("making weights"):
            check_dtype(dtype)
            lm = random_model(shape, known_shape(shape), dtype)
    report = measure(
        lm,
        policies,
        prompts=prompts,
        batches=batches,
        steps=steps,
        repeats=repeats,
        prefill=prefill,
        callback=lambda line: typer.echo(line, err=True),
        **cast(SamplingKeywords, drawing),
    )
    name = model or shape or "the embedded model"
    if plot is not None:
        measuring.plot(report, plot, title=name)
    if as_json:
        echo_json({"model": name} | dataclasses.asdict(report))
        return
    typer.echo(f"{name} in {report.dtype} on {report.device}, JAX {report.jax}\n")
    typer.echo(reports.format_columns(measuring.decode_rows(report)))
    typer.echo("\nmilliseconds of a decode step, by difference, and of the prefill of all rows\n")
    typer.echo(reports.format_columns(measuring.part_rows(report)))
    typer.echo("\n".join(["", measuring.device_line(report), *report.skipped]))


def _split_policies(options: list[str] | None) -> list[str]:
    """Split the values of ``--cache`` into policies. After a comma, a word without ``=`` starts
    another policy."""
    policies: list[str] = []
    for option in options or ["static"]:
        for number, part in enumerate(option.split(",")):
            if "=" in part and number:
                policies[-1] += f",{part.strip()}"
            else:
                policies.append(part.strip())
    return policies


def _integers(option: str, value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {value!r}: give integers separated by commas") from None


def random_model(name: str, shape: ModelShape, dtype: str | None) -> LanguageModel:
    """Create a model of the given shape with random weights.

    Raises:
      ValueError: if kvjax can't run such a model, or its weights do not fit the memory.
    """
    from kvjax.models.architecture import Architecture
    from kvjax.models.config import LlamaConfig, RopeConfig
    from kvjax.models.loading import GenerationDefaults

    if not shape.gated or shape.learned_positions:
        raise ValueError(
            f"can't make {name} with random weights: only shapes like Llama's are supported (gated "
            "MLP, rotary positions)"
        )
    config = LlamaConfig(
        model_type="llama", vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim,
        max_position_embeddings=shape.context or 2**20, rms_norm_eps=1e-5, hidden_act="silu",
        tie_word_embeddings=shape.tied, qkv_bias=False, output_bias=False, mlp_bias=False,
        qk_norm=False, rope=RopeConfig(), windows=layer_windows(shape),
        dtype=dtype or ("float32" if Device().platform() == "cpu" else shape.dtype),
    )  # fmt: skip
    architecture = Architecture(config)
    weights, memory = weight_bytes(architecture), _memory()
    if memory is not None and weights > memory:
        raise ValueError(
            f"the weights of {name} take {readable_bytes(weights)}, but the memory has only "
            f"{readable_bytes(memory)}"
        )
    shapes = architecture.abstract_params()
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))
    # Use one program per array. A single program for all arrays would need the memory twice.
    like = jax.jit(lambda key, x: 0.02 * jax.random.normal(key, x.shape, x.dtype), static_argnums=1)
    params = jax.tree.map(lambda leaf: Device().put(like(next(keys), leaf)), shapes)
    return LanguageModel(config, params, None, GenerationDefaults(), architecture, source=name)


def _memory() -> int | None:
    """Return the memory of the device in bytes, or of the host if the device is a CPU; None if
    unknown."""
    with contextlib.suppress(ValueError):
        return device_memory()
    with contextlib.suppress(AttributeError, ValueError):  # not on every system
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
