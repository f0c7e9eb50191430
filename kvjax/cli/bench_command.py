"""``kvjax bench``: how fast a model decodes here, and where the time goes."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import jax
import typer

from kvjax.cli import options
from kvjax.cli.common import check_dtype, known_shape, use_compilation_cache
from kvjax.cli.progress import shown
from kvjax.cli.streams import echo_json
from kvjax.core.reporting import readable_bytes
from kvjax.memory.limits import device_memory
from kvjax.memory.sizes import weight_bytes
from kvjax.placement.device import Device
from kvjax.policies.model_config import layer_windows
from kvjax.policies.presets import parse_policy

if TYPE_CHECKING:
    from kvjax.generation.loaded_model import LanguageModel
    from kvjax.memory.shapes import ModelShape


def bench(
    model: options.Model = None,
    revision: options.Revision = None,
    shape: options.KnownShape = None,
    dtype: options.Dtype = None,
    batch: Annotated[str, typer.Option("--batch", "-b", help="Rows: 1,8.")] = "1",
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Tokens: 64,512.")] = "64,512,2048",
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy, NAME or NAME,SETTING=VALUE,...; several with commas, or repeated."
        ),
    ] = None,
    kv_bits: options.Bits = None,
    key_bits: options.KeyBits = None,
    value_bits: options.ValueBits = None,
    group_size: options.Group = None,
    window: options.Window = None,
    sinks: options.Sinks = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    steps: Annotated[int, typer.Option(help="Steps that are timed together, at most 128.")] = 32,
    repeats: Annotated[int, typer.Option(help="How often; medians are shown.")] = 5,
    prefill: Annotated[bool, typer.Option(help="Time prefill too.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw time and bandwidth (png, svg).")] = None,
    as_json: options.Json = False,
) -> None:
    """Time decoding and prefill on this device: by batch, length of the prompt, and policy."""
    use_compilation_cache()
    from kvjax import models
    from kvjax.bench import measure, tables
    from kvjax.quality import reports

    if shape is not None and (model is not None or revision is not None):
        raise ValueError("give one of --model (with its --revision) and --shape")
    bits = {"bits": kv_bits, "key_bits": key_bits, "value_bits": value_bits, "group": group_size,
            "window": window, "sinks": sinks}  # fmt: skip
    given = "".join(f",{name}={n}" for name, n in bits.items() if n is not None)
    named = {words + given: parse_policy(words + given) for words in _policies(cache)}
    if plot is not None:
        reports.pyplot()  # if it is missing, that is told before anything is measured
    batches, prompts = _numbers("--batch", batch), _numbers("--prompt", prompt)
    if shape is None:
        with shown("loading"):
            lm = models.load(model, dtype=dtype, revision=revision)
    else:
        with shown("making weights"):
            check_dtype(dtype)
            lm = random_model(shape, known_shape(shape), dtype)
    found = measure(
        lm, named, prompts=prompts, batches=batches, steps=steps, repeats=repeats, prefill=prefill,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        told=lambda words: typer.echo(words, err=True),
    )  # fmt: skip
    name = model or shape or "the embedded model"
    if plot is not None:
        tables.plot(found, plot, title=name)
    if as_json:
        echo_json({"model": name} | dataclasses.asdict(found))
        return
    typer.echo(f"{name} in {found.dtype} on {found.device}, JAX {found.jax}\n")
    typer.echo(reports.format_columns(tables.decode_rows(found)))
    typer.echo("\nmilliseconds of a step by difference; a prompt's, all rows together\n")
    typer.echo(reports.format_columns(tables.part_rows(found)))
    typer.echo("\n".join(["", tables.device_line(found), *found.left_out]))


def _policies(given: list[str] | None) -> list[str]:
    """Policies in words, one each: a piece without a value begins another."""
    found: list[str] = []
    for words in given or ["static"]:
        for number, piece in enumerate(words.split(",")):
            if "=" in piece and number:
                found[-1] += f",{piece.strip()}"
            else:
                found.append(piece.strip())
    return found


def _numbers(option: str, words: str) -> list[int]:
    try:
        return [int(piece) for piece in words.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {words!r}: give whole numbers with commas") from None


def random_model(name: str, shape: "ModelShape", dtype: str | None) -> "LanguageModel":
    """A model of a shape with random weights, if kvjax runs such a model and its weights fit."""
    from kvjax.generation.loaded_model import LanguageModel
    from kvjax.models.architecture import Architecture
    from kvjax.models.config import LlamaConfig, RopeConfig
    from kvjax.models.generation import GenerationDefaults

    if not shape.gated or shape.learned_positions:
        raise ValueError(
            f"kvjax runs no {name} with random weights: of these shapes it runs those that are "
            "like Llama (gated, with rotary positions)"
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
            f"the weights of {name} take {readable_bytes(weights)}, but there are only "
            f"{readable_bytes(memory)} of memory"
        )
    shapes = architecture.abstract_params()
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))
    # An array at a time: all of them as one program would be there twice.
    like = jax.jit(lambda key, x: 0.02 * jax.random.normal(key, x.shape, x.dtype), static_argnums=1)
    params = jax.tree.map(lambda leaf: Device().put(like(next(keys), leaf)), shapes)
    return LanguageModel(config, params, None, GenerationDefaults(), architecture, source=name)


def _memory() -> int | None:
    """Bytes of the device's memory, or of the machine's where it is that; None if not told."""
    with contextlib.suppress(ValueError):
        return device_memory()
    with contextlib.suppress(AttributeError, ValueError):  # not every system has these names
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
