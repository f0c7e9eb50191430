"""Write the embedded model in the Transformers format, and plot its losses."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from ..config import LlamaConfig


def export(params: dict[str, Any], config: LlamaConfig, folder: Path) -> None:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors`` in bfloat16.

    The tied head is omitted, as in Transformers. Weights are written to a temporary file and then
    renamed, so the folder never contains an incomplete file.
    """
    tensors = {
        name: np.ascontiguousarray(np.asarray(jax.device_get(x)).astype(jnp.bfloat16))
        for name, x in _flat(params, "")
    }
    unfinished = folder / "model.safetensors.unfinished"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)  # safetensors makes new files readable by their owner only
    unfinished.replace(folder / "model.safetensors")
    written = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": config.qkv_bias,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "dtype": "bfloat16",
        "eos_token_id": 0,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": config.mlp_bias,
        "model_type": config.model_type,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": 0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope.theta, "rope_type": "default"},
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    _write(folder / "config.json", written)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    _write(folder / "generation_config.json", ids)


def plot_losses(entries: Sequence[dict[str, float]], tokens: int, file: Path) -> None:
    """Plot the losses in ``losses.jsonl`` by tokens seen, with ``tokens`` tokens per step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for key, label in (("loss", "training"), ("validation", "validation")):
        points = [(e["step"] * tokens / 1e6, e[key]) for e in entries if key in e]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1)
    axes.set(xlabel="million tokens", ylabel="nats a token", title="loss of the embedded model")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def _flat(node: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, child in node.items():
        if isinstance(child, dict):
            yield from _flat(child, f"{path}{key}.")
        else:
            yield path + key, child


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
