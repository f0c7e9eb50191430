"""Write the GGUF files of this folder and the logits that they must give.

Each file is a small random model of Transformers that llama.cpp's own converter has converted, so
nothing here shares code with the loader. The logits are Transformers', computed in float64.

The script needs PyTorch, Transformers (written with 5.23), and a copy of llama.cpp's repository
(written with the one in the sources of llama-cpp-python 0.3.36), whose converter brings its own
version of the package gguf. All files are written again by:

    python tests/data/gguf/make.py LLAMA_CPP/convert_hf_to_gguf.py

The models have no tokenizer: of that step of the converter, only the ids of special tokens are
kept. ``tests/test_gguf_converted.py`` reads the files.
"""

import importlib
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
BATCH, LENGTH, VOCABULARY = 2, 24, 40

SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EPSILONS = "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"
GENERATION = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}


def rope(kind: str = "default", **parameters: Any) -> dict[str, Any]:
    """Rotary positions with a small base, so that the slow frequencies count too."""
    return {"rope_type": kind, "rope_theta": 500.0, **parameters}


ROPE = {"rope_parameters": rope()}
GEMMA = {"hidden_size": 8, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
GEMMA3 = {**GEMMA, "num_hidden_layers": 7}
EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 8}
NEOX = {"rotary_pct": 0.5}


def gemma3_rope(full: dict[str, Any]) -> dict[str, Any]:
    sliding = {"rope_type": "default", "rope_theta": 300.0}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def phi3_rope(original: int, **parameters: Any) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": rope(original_max_position_embeddings=original, **parameters),
    }


def longrope(original: int, count: int, **parameters: Any) -> dict[str, Any]:
    factors = {
        "short_factor": [1.1 + n / 8 for n in range(count)],
        "long_factor": [1.5 + n / 2 for n in range(count)],
    }
    return phi3_rope(original, kind="longrope", **factors, **parameters)


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**ROPE, "tie_word_embeddings": True}),
    "llama-llama3": (
        "Llama",
        {
            "rope_parameters": rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
        },
    ),
    "llama-linear": ("Llama", {"rope_parameters": rope("linear", factor=4.0)}),
    "llama-yarn": (
        "Llama",
        {"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=16)},
    ),
    "llama-yarn-betas": (
        "Llama",
        {
            "rope_parameters": rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                beta_fast=0.5,
                beta_slow=0.1,
            )
        },
    ),
    "llama-biases": ("Llama", {**ROPE, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {**ROPE, "head_dim": 12}),
    "mixtral": ("Mixtral", {**ROPE, **EXPERTS, "num_local_experts": 3, "sliding_window": None}),
    "mistral": ("Mistral", {**ROPE, "sliding_window": None}),
    "qwen2": ("Qwen2", ROPE),
    "qwen3": ("Qwen3", {**ROPE, "head_dim": 12}),
    "qwen3moe": (
        "Qwen3Moe",
        {
            **ROPE,
            **EXPERTS,
            "head_dim": 12,
            "num_experts": 3,
            "moe_intermediate_size": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
    ),
    # The converter does not write the base of gemma2's frequencies.
    "gemma2": (
        "Gemma2",
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "rope_theta": 10000.0,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": ("Gemma3Text", {**GEMMA3, **gemma3_rope(rope())}),
    "gemma3-linear": ("Gemma3Text", {**GEMMA3, **gemma3_rope(rope("linear", factor=8.0))}),
    "gemma3-full": (
        "Gemma3Text",
        {
            **GEMMA3,
            **gemma3_rope(rope()),
            "num_hidden_layers": 2,
            "layer_types": ["full_attention"] * 2,
            "sliding_window_pattern": 1,
        },
    ),
    "phi3": ("Phi3", {**phi3_rope(64), "sliding_window": 8}),
    "phi3-longrope": ("Phi3", {**longrope(16, 4), "sliding_window": None}),
    "phi3-partial": (
        "Phi3",
        {
            **longrope(32, 3, partial_rotary_factor=0.75),
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", ROPE),
    "smollm3": (
        "SmolLM3",
        {**ROPE, "num_hidden_layers": 4, "tie_word_embeddings": True},
    ),
    "cohere2": (
        "Cohere2",
        {
            **ROPE,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "logit_scale": 0.5,
        },
    ),
    # The converter does not write the base of gptneox's frequencies.
    "gptneox": ("GPTNeoX", {**NEOX, "use_parallel_residual": True}),
    "gptneox-sequential": ("GPTNeoX", {**NEOX, "use_parallel_residual": False}),
    "gpt2": ("GPT2", {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}),
}
"""The name of a file, the prefix of the config's class in Transformers, and the config's fields."""

FIELDS = {
    "cohere2": {"rotary_pct": 1.0},
    "gptneox": {"rotary_pct": 0.5},
    "gptneox-sequential": {"rotary_pct": 0.5},
    "gpt2": {"n_ctx": LENGTH},
}
"""Fields of published ``config.json`` files that the converter reads, and that Transformers 5
removes or renames."""

SHORT = {"phi3-longrope": 12}
"""Shorter lengths for which there are logits too: LongRoPE has other factors then."""


def random_model(name: str) -> Any:
    """A model of Transformers with random parameters, norms and biases too."""
    prefix, fields = MODELS[name]
    shared = SHARED
    if prefix == "GPT2":
        shared = {k: v for k, v in SHARED.items() if k == "vocab_size" or k.endswith("_id")}
    config = getattr(transformers, f"{prefix}Config")(**{**shared, **fields})
    for epsilon in EPSILONS:
        if hasattr(config, epsilon):
            setattr(config, epsilon, 3e-3)  # larger than usual, so that it counts
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **kinds)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            scale = 1.0 if "embed" in parameter or "wte" in parameter else 0.3
            drawn = rng.standard_normal(tuple(values.shape)) * scale
            # The norms of Gemma add 1 to their weights.
            if values.ndim == 1 and parameter.endswith("weight") and "Gemma" not in prefix:
                drawn += 1
            values.copy_(torch.tensor(drawn, dtype=torch.float32))
    model.generation_config = transformers.GenerationConfig(
        **GENERATION, **{k: v for k, v in SHARED.items() if k.endswith("_token_id")}
    )
    return model.eval()


def special_tokens(model: Any) -> None:
    """In place of the converter's step for tokenizers: the ids of special tokens."""
    gguf = sys.modules["gguf"]
    model.gguf_writer.add_tokenizer_model("none")
    gguf.SpecialVocab(model.dir_model).add_to_gguf(model.gguf_writer)


def convert(converter: Any, folder: Path, file: Path) -> None:
    """Run llama.cpp's converter on a folder."""
    base = converter.ModelBase
    original = base.load_hparams

    def load_hparams(folder: Path, is_mistral_format: bool) -> dict[str, Any]:
        return {**original(folder, is_mistral_format), **FIELDS.get(file.stem, {})}

    base.load_hparams = staticmethod(load_hparams)
    fields = load_hparams(folder, False)
    architecture = converter.get_model_architecture(fields, converter.ModelType.TEXT)
    converter.get_model_class(architecture).set_vocab = special_tokens
    sys.argv = [converter.__name__, str(folder), "--outtype", "f32", "--outfile", str(file)]
    try:
        converter.main()
    finally:
        base.load_hparams = original


def main() -> None:
    path = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(path.parent))
    converter = importlib.import_module(path.stem)
    # Every id occurs, in an order that is different for each row.
    rng = np.random.default_rng(0)
    tokens = rng.permuted(np.arange(BATCH * LENGTH) % VOCABULARY).reshape(BATCH, LENGTH)
    stored = {"tokens": tokens.astype(np.int32)}
    for name in MODELS:
        model = random_model(name)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / name
            model.save_pretrained(folder)
            # The converter of gemma3 counts the tokens in this file.
            vocabulary = {"vocab": {str(n): n for n in range(VOCABULARY)}}
            text = json.dumps({"model": vocabulary, "added_tokens": []})
            (folder / "tokenizer.json").write_text(text, encoding="utf-8")
            if (pattern := MODELS[name][1].get("sliding_window_pattern")) is not None:
                config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
                config["sliding_window_pattern"] = pattern
                (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            convert(converter, folder, HERE / f"{name}.gguf")
        model = model.double()
        with torch.no_grad():
            for length in (LENGTH, *([SHORT[name]] if name in SHORT else [])):
                logits = model(torch.tensor(tokens[:, :length])).logits
                key = name if length == LENGTH else f"{name}@{length}"
                stored[key] = logits.numpy().astype(np.float32)
    np.savez_compressed(HERE / "logits.npz", **stored)


if __name__ == "__main__":
    main()
