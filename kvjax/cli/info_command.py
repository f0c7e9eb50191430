"""``kvjax info``: a model, its cache, and the devices."""

from collections.abc import Iterable
from typing import Any

import jax
import typer

import kvjax
from kvjax.attention.paths import gained_by_upgrading
from kvjax.cli import options
from kvjax.cli.options import cache_policy
from kvjax.cli.output import bytes_by_place, echo_json, format_table, show_progress
from kvjax.core.reporting import readable_bytes
from kvjax.core.target import current_target
from kvjax.memory.sizes import bytes_per_token
from kvjax.policies.model_config import layer_heads


def info(
    *,
    model: options.ModelOptions,
    cache: options.Cache = "static",
    quantization: options.Quantization,
    sliding_window: options.SlidingWindow,
    as_json: options.Json = False,
) -> None:
    """Show a model, the size of its cache per token, the devices, and what a newer JAX adds."""
    with show_progress("loading"):
        lm = model.load()
    config, params = lm.config, jax.tree.leaves(lm.params)
    policy = cache_policy(cache, quantization, sliding_window)
    report: dict[str, Any] = {
        "model": model.model or "the embedded model",
        "type": config.model_type,
        "parameters": sum(array.size for array in params),
        "parameter_bytes": sum(array.nbytes for array in params),
        "dtype": config.dtype,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "key_value_heads": _one_or_all(heads for heads, _ in layer_heads(config)),
        "head_dim": _one_or_all(head_dim for _, head_dim in layer_heads(config)),
        "vocabulary": config.vocab_size,
        "context": config.context,
        "cache": cache,
        "cache_bytes_a_token": bytes_per_token(config, policy),
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()],
        "versions": {"kvjax": kvjax.__version__, "jax": jax.__version__},
        "upgrade": gained_by_upgrading(current_target()),
    }
    if as_json:
        echo_json(report)
        return
    report["parameter_bytes"] = readable_bytes(report["parameter_bytes"])
    report["cache_bytes_a_token"] = bytes_by_place(report["cache_bytes_a_token"])
    if config.context is None:
        report["context"] = "any"
    if report["upgrade"] is None:
        del report["upgrade"]
    typer.echo(format_table(report))


def _one_or_all(sizes: Iterable[int]) -> int | list[int]:
    """Return the size that all layers have, or the sorted list of their sizes if they differ."""
    distinct = sorted(set(sizes))
    return distinct[0] if len(distinct) == 1 else distinct
