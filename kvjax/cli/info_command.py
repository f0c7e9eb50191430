"""``kvjax info``: a model, its cache, and the devices."""

from typing import Annotated

import typer

from kvjax.cli.common import (
    BitsOption,
    CacheOption,
    DtypeOption,
    GroupOption,
    KeyBitsOption,
    ModelOption,
    RevisionOption,
    ValueBitsOption,
)
from kvjax.cli.figures import table, to_json


def info(
    model: ModelOption = None,
    revision: RevisionOption = None,
    dtype: DtypeOption = None,
    cache: CacheOption = "static",
    kv_bits: BitsOption = None,
    key_bits: KeyBitsOption = None,
    value_bits: ValueBitsOption = None,
    group_size: GroupOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a model, the bytes its cache takes a token, and the devices."""
    import jax

    import kvjax
    from kvjax import models
    from kvjax.memory.sizes import bytes_a_token

    lm = models.load(model, dtype=dtype, revision=revision)
    config, leaves = lm.config, jax.tree.leaves(lm.params)
    policy = kvjax.policy(
        cache, bits=kv_bits, key_bits=key_bits, value_bits=value_bits, group=group_size
    )
    cache_bytes = bytes_a_token(config, policy)
    report = {
        "model": model or "the embedded model",
        "type": config.model_type,
        "parameters": sum(leaf.size for leaf in leaves),
        "parameter_bytes": sum(leaf.nbytes for leaf in leaves),
        "dtype": config.dtype,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "cache": cache,
        "cache_bytes_a_token": cache_bytes,
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()],
        "versions": {"kvjax": kvjax.__version__, "jax": jax.__version__},
    }
    typer.echo(to_json(report) if as_json else table(report))
