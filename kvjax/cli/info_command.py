"""``kvjax info``: a model, its cache, and the devices."""

from collections.abc import Iterable

import jax
import typer

import kvjax
from kvjax.attention.kernels.dispatch import gained_by_upgrading
from kvjax.cli import options
from kvjax.cli.output import by_place, table
from kvjax.cli.progress import shown
from kvjax.cli.streams import echo_json
from kvjax.core.reporting import readable_bytes
from kvjax.core.target import current_target
from kvjax.memory.sizes import bytes_per_token
from kvjax.policies.model_config import layer_heads
from kvjax.policies.presets import parse_policy


def info(
    model: options.Model = None,
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    cache: options.Cache = "static",
    kv_bits: options.Bits = None,
    key_bits: options.KeyBits = None,
    value_bits: options.ValueBits = None,
    group_size: options.Group = None,
    window: options.Window = None,
    sinks: options.Sinks = None,
    as_json: options.Json = False,
) -> None:
    """Show a model, the bytes its cache takes a token, the devices, and what a newer JAX gains."""
    from kvjax import models

    with shown("loading"):
        lm = models.load(model, dtype=dtype, revision=revision)
    config, leaves = lm.config, jax.tree.leaves(lm.params)
    policy = parse_policy(
        cache, bits=kv_bits, key_bits=key_bits, value_bits=value_bits, group=group_size,
        window=window, sinks=sinks,
    )  # fmt: skip
    report = {
        "model": model or "the embedded model",
        "type": config.model_type,
        "parameters": sum(leaf.size for leaf in leaves),
        "parameter_bytes": sum(leaf.nbytes for leaf in leaves),
        "dtype": config.dtype,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "key_value_heads": _of_layers(heads for heads, _ in layer_heads(config)),
        "head_dim": _of_layers(head_dim for _, head_dim in layer_heads(config)),
        "vocabulary": config.vocab_size,
        "context": config.context,
        "cache": cache,
        "cache_bytes_a_token": bytes_per_token(config, policy),
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()],
        "versions": {"kvjax": kvjax.__version__, "jax": jax.__version__},
        "upgrade": gained_by_upgrading(current_target()),
    }
    if not as_json:
        report["parameter_bytes"] = readable_bytes(report["parameter_bytes"])
        report["cache_bytes_a_token"] = by_place(report["cache_bytes_a_token"])
    if not as_json and config.context is None:
        report["context"] = "any"
    if not as_json and report["upgrade"] is None:
        del report["upgrade"]
    echo_json(report) if as_json else typer.echo(table(report))


def _of_layers(sizes: Iterable[int]) -> int | list[int]:
    """What all layers have, or all that some of them have."""
    found = sorted(set(sizes))
    return found[0] if len(found) == 1 else found
