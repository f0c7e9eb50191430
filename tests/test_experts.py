"""Experts: in files one by one or joined, and few or many tokens at once."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax import models
from kvjax.models import weights
from kvjax.models.moe import Experts

FIELDS = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2,
    "dtype": "float32",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24},
}
TOKENS = np.arange(12, dtype=np.int32).reshape(2, 6)
NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
         "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj")}  # fmt: skip


def write(folder: Path, model_type: str) -> Path:
    """A checkpoint with a tensor for each expert's matrix, as published ones have it."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": model_type, **FIELDS, **KINDS[model_type]})
    )
    lm = models.Architecture(models.read_config(folder)).abstract_params()
    rng, (mlp, *matrices) = np.random.default_rng(0), NAMES[model_type]
    tensors: dict[str, np.ndarray] = {}

    def walk(node: Any, path: str) -> None:
        for key, child in node.items():
            if isinstance(child, dict):
                walk(child, f"{path}{key}.")
            elif "experts" not in path:
                values = 0.3 * rng.standard_normal(child.shape)
                tensors[(path + key).replace("mlp", mlp)] = values.astype(np.float32)

    walk(lm, "")
    for number in range(4):
        for matrix, shape in zip(matrices, ((24, 16), (24, 16), (16, 24)), strict=True):
            name = f"model.layers.0.{mlp}.experts.{number}.{matrix}.weight"
            tensors[name] = rng.standard_normal(shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def change(folder: Path, **changed: np.ndarray | None) -> Path:
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **changed}
    save_file({k: v for k, v in tensors.items() if v is not None}, file)
    return folder


@pytest.mark.parametrize("model_type", list(KINDS))
def test_joined_or_one_by_one(tmp_path: Path, model_type: str) -> None:
    """Both forms give the same parameters, and what is saved has a tensor for each expert."""
    folder = write(tmp_path / "apart", model_type)
    lm = models.load(folder, dtype="float32")
    lm.save(tmp_path / "again")
    stored = load_file(folder / "model.safetensors")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert set(stored) == set(again)
    assert all(np.array_equal(stored[name], again[name]) for name in stored)
    mlp, *matrices = NAMES[model_type]
    place = f"model.layers.0.{mlp}.experts"
    gate, up, down = (
        np.stack([stored[f"{place}.{number}.{matrix}.weight"] for number in range(4)])
        for matrix in matrices
    )
    gone: dict[str, Any] = {name: None for name in stored if ".experts." in name}
    joined = {"gate_up_proj": np.concatenate([gate, up], axis=1), "down_proj": down}
    change(folder, **gone, **{f"model.layers.0.mlp.experts.{k}": v for k, v in joined.items()})
    other = models.load(folder, dtype="float32")
    assert jax.tree.structure(other.params) == jax.tree.structure(lm.params)
    for ours, theirs in zip(jax.tree.leaves(lm.params), jax.tree.leaves(other.params), strict=True):
        assert np.array_equal(ours, theirs)


def test_joined_ones_stay_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up are one tensor of Llama 4's files, however small a file is to be."""
    folder = tmp_path / "made"
    folder.mkdir()
    fields = {"model_type": "llama4_text", "head_dim": 8, "intermediate_size_mlp": 20}
    (folder / "config.json").write_text(json.dumps({**FIELDS, **fields, "num_local_experts": 3}))
    model = models.Architecture(models.read_config(folder))
    params = model.init_params(0)
    monkeypatch.setattr(weights, "SHARD", 1)
    model.save(params, folder, tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 3
    again = models.load(tmp_path / "saved", dtype="float32")
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(again.params), strict=True):
        assert np.array_equal(ours, theirs)


def test_experts_that_do_not_fit(tmp_path: Path) -> None:
    first = "model.layers.0.mlp.experts.0.up_proj.weight"
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "missing": ({first: None}, "missing tensor .*experts.up_proj.weight of expert 0"),
        "misshapen": ({first: np.zeros((23, 16), np.float32)},
                      r"experts.1.up_proj.* is F32 \[24, 16\]; expected F32 \[23, 16\]"),
        "narrow": ({first: np.zeros((24, 16), np.float16)}, "is F32 .*; expected F16"),
        "more": ({first.replace(".0.up", ".4.up"): np.zeros((24, 16), np.float32)},
                 r"has shape \[5, 24, 16\]; expected \[4, 24, 16\] according to"),
    }  # fmt: skip
    for name, (changed, message) in cases.items():
        folder = change(write(tmp_path / name, "qwen3_moe"), **changed)
        with pytest.raises(kvjax.CheckpointError, match=message):
            models.load(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_tokens_and_many_are_the_same(tmp_path: Path, dtype: str) -> None:
    """What is gathered for few is what every expert gives; of what no one chose, nothing comes."""
    config = models.read_config(write(tmp_path / "model", "mixtral"))
    assert isinstance(config, models.MoeConfig)
    config = type(config)(**{**vars(config), "dtype": dtype})
    experts = Experts(config, rngs=nnx.Rngs(0))
    weights = tuple(
        30 * x.weight[...] for x in (experts.gate_proj, experts.up_proj, experts.down_proj)
    )
    broken = (*weights[:2], weights[2].at[3].set(jnp.inf))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 16)), dtype)
    chosen = jnp.asarray([[0, 1], [2, 0], [1, 0], [1, 2], [0, 2]])
    parts = jnp.asarray(rng.uniform(0.1, 1, (5, 2)) * [1, -1], jnp.float32)  # Gemma 4's have a sign
    few, many = (
        np.asarray(jax.jit(way)(x, broken, chosen, parts), np.float64)
        for way in (experts._few, experts._many)
    )
    gate, up, down = (np.asarray(each, np.float64) for each in weights)
    expected = np.zeros((5, 16))
    for row, (who, share) in enumerate(zip(chosen, parts, strict=True)):
        for expert, part in zip(who, share, strict=True):
            y = gate[expert] @ np.asarray(x[row], np.float64)
            y = y / (1 + np.exp(-y)) * (up[expert] @ np.asarray(x[row], np.float64))
            expected[row] += float(part) * (down[expert] @ y)
    bound = {"float32": 1e-5, "bfloat16": 2e-2}[dtype] * np.max(np.abs(expected))
    assert np.max(np.abs(few - expected)) <= bound
    assert np.max(np.abs(many - expected)) <= bound


def test_gradients_of_the_router_and_experts(tmp_path: Path) -> None:
    lm = models.load(write(tmp_path / "model", "qwen3_moe"), dtype="float32")

    def loss(params: Any) -> Any:
        return jnp.mean(jnp.square(lm.apply(params, jnp.asarray(TOKENS))))

    found = jax.jit(jax.grad(loss))(lm.params)["model"]["layers"]["0"]["mlp"]
    for leaf in jax.tree.leaves(found):
        assert np.all(np.isfinite(leaf)) and np.any(np.asarray(leaf) != 0)
