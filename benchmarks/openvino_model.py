"""A Llama checkpoint in the Transformers format as an OpenVINO model whose caches are its state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov  # pyright: ignore[reportMissingImports]
import openvino.opset15 as ops  # pyright: ignore[reportMissingImports]
from safetensors import safe_open


def _rope_theta(config: dict[str, Any]) -> float:
    """The base of rotary positions, by its older or its newer name."""
    return (config.get("rope_parameters") or config)["rope_theta"]


class Builder:
    """The graph of one model: operations are written as the plugin's fusions look for them."""

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        with safe_open(folder / "model.safetensors", framework="np") as tensors:
            names = list(tensors.keys())
            self.weights = {name: ops.constant(tensors.get_tensor(name)) for name in names}
        self.numbers = sum(int(np.prod(x.shape)) for x in self.weights.values())
        self.sinks: list[Any] = []

    def linear(self, x: Any, name: str) -> Any:
        return ops.matmul(x, self.weights[f"{name}.weight"], False, True)

    def norm(self, x: Any, name: str) -> Any:
        square = ops.power(x, np.float32(2))
        mean = ops.reduce_mean(square, np.array([-1], np.int64), True)
        root = ops.sqrt(ops.add(mean, np.float32(self.config["rms_norm_eps"])))
        scaled = ops.multiply(x, ops.divide(np.float32(1), root))
        return ops.multiply(self.weights[f"{name}.weight"], scaled)

    def heads(self, x: Any, count: int) -> Any:
        """[batch, tokens, count * head_dim] as [batch, count, tokens, head_dim]."""
        shape = np.array([0, 0, count, self.config["head_dim"]], np.int64)
        split = ops.reshape(x, shape, special_zero=True)
        return ops.transpose(split, np.array([0, 2, 1, 3], np.int64))

    def turned(self, x: Any) -> Any:
        half = self.config["head_dim"] // 2
        parts = ops.variadic_split(x, np.int64(-1), np.array([half, half], np.int64))
        minus = ops.multiply(parts.output(1), np.float32(-1))
        rotated = ops.concat([minus, parts.output(0)], -1)
        return ops.add(ops.multiply(x, self.cos), ops.multiply(rotated, self.sin))

    def cached(self, new: Any, name: str) -> Any:
        """All of a layer's keys or values, those of earlier calls first, for every query head."""
        config = self.config
        count, groups = config["num_key_value_heads"], config["num_attention_heads"]
        groups //= count
        tail = np.array([count, 0, config["head_dim"]], np.int64)
        empty = ops.broadcast(np.float32(0), ops.concat([self.batch, tail], 0))
        shape = ov.PartialShape([-1, count, -1, config["head_dim"]])
        past = ops.read_value(empty, name, ov.Type.f32, shape)
        past = ops.gather(past, self.rows, np.int64(0))
        whole = ops.concat([past, new], 2)
        self.sinks.append(ops.assign(whole, name))
        if groups == 1:
            return whole
        lifted = ops.unsqueeze(whole, np.int64(2))
        # Ones where a side stays as it is: all but the query heads of a key.
        ones = np.array([1, 1, groups, 1, 1], np.int64)
        shared = ops.broadcast(lifted, ones, broadcast_spec="BIDIRECTIONAL")
        joined = np.array([0, count * groups, -1, config["head_dim"]], np.int64)
        return ops.reshape(shared, joined, special_zero=True)

    def layer(self, x: Any, index: int) -> Any:
        config, name = self.config, f"model.layers.{index}"
        normed = self.norm(x, f"{name}.input_layernorm")
        count, kv_count = config["num_attention_heads"], config["num_key_value_heads"]
        queries = self.heads(self.linear(normed, f"{name}.self_attn.q_proj"), count)
        keys = self.heads(self.linear(normed, f"{name}.self_attn.k_proj"), kv_count)
        values = self.heads(self.linear(normed, f"{name}.self_attn.v_proj"), kv_count)
        mixed = ops.scaled_dot_product_attention(
            self.turned(queries),
            self.cached(self.turned(keys), f"keys.{index}"),
            self.cached(values, f"values.{index}"),
            self.mask,
        )
        shape = np.array([0, 0, count * config["head_dim"]], np.int64)
        flat = ops.transpose(mixed, np.array([0, 2, 1, 3], np.int64))
        flat = ops.reshape(flat, shape, special_zero=True)
        x = ops.add(x, self.linear(flat, f"{name}.self_attn.o_proj"))
        normed = self.norm(x, f"{name}.post_attention_layernorm")
        gate = ops.swish(self.linear(normed, f"{name}.mlp.gate_proj"))
        inner = ops.multiply(gate, self.linear(normed, f"{name}.mlp.up_proj"))
        return ops.add(x, self.linear(inner, f"{name}.mlp.down_proj"))

    def model(self) -> ov.Model:
        """From tokens, their positions, those of all keys, and rows, to each row's last logits."""
        config = self.config
        tokens = ops.parameter([-1, -1], np.int64, "tokens")
        positions = ops.parameter([-1], np.int64, "positions")
        seen = ops.parameter([-1], np.int64, "seen")
        self.rows = ops.parameter([-1], np.int32, "rows")
        shape = ops.shape_of(tokens)
        self.batch = ops.gather(shape, np.array([0], np.int64), np.int64(0))
        half = np.arange(0, config["head_dim"], 2, dtype=np.float32) / config["head_dim"]
        frequencies = (_rope_theta(config) ** -half).astype(np.float32)
        times = ops.convert(ops.unsqueeze(positions, np.int64(1)), "f32")
        angles = ops.multiply(times, frequencies[None])
        angles = ops.concat([angles, angles], -1)
        two = np.array([0, 1], np.int64)
        self.cos = ops.unsqueeze(ops.cos(angles), two)
        self.sin = ops.unsqueeze(ops.sin(angles), two)
        visible = ops.less_equal(
            ops.unsqueeze(seen, np.int64(0)), ops.unsqueeze(positions, np.int64(1))
        )
        mask = ops.select(visible, np.float32(0), np.float32(-np.inf))
        self.mask = ops.unsqueeze(mask, two)
        x = ops.gather(self.weights["model.embed_tokens.weight"], tokens, np.int64(0))
        for index in range(config["num_hidden_layers"]):
            x = self.layer(x, index)
        last = ops.gather(x, np.int64(-1), np.int64(1))
        tied = config["tie_word_embeddings"]
        logits = self.linear(
            self.norm(last, "model.norm"), "model.embed_tokens" if tied else "lm_head"
        )
        inputs = [tokens, positions, seen, self.rows]
        return ov.Model([ops.result(logits)], self.sinks, inputs, "llama")
