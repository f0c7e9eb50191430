"""Small random checkpoints in the form of Transformers', written without it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<s>", "</s>"
WEIGHTS = "model.safetensors"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message.role }}]{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tokenizer(folder: Path) -> int:
    """Write a byte-level tokenizer, a token a byte, and give its vocabulary's size, 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return tokenizer.get_vocab_size()


def write_llama(folder: Path, *, seed: int = 0, dtype: Any = np.float32, **changes: Any) -> Path:
    """Write a random Llama: 2 layers, hidden 64, 4 heads, 2 key-value heads of 16, float32.

    Args:
      folder: where to; it is made.
      seed: of the weights.
      dtype: that they are stored in; ``config.json`` says float32 all the same.
      changes: fields of ``config.json`` to set otherwise; the weights follow the sizes in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    } | changes
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]},
    )
    tensors = llama_tensors(config, seed)
    stored = {name: x.astype(dtype, copy=False) for name, x in tensors.items()}
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    return folder


def llama_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights for ``config``, under the names of Transformers."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def linear(out: int, into: int) -> np.ndarray:
        return (rng.standard_normal((out, into)) / np.sqrt(into)).astype(np.float32)

    def norm() -> np.ndarray:
        return rng.uniform(0.5, 1.5, hidden).astype(np.float32)

    tensors = {"model.embed_tokens.weight": linear(config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        tensors |= {
            f"model.layers.{i}.{name}.weight": value
            for name, value in {
                "input_layernorm": norm(),
                "self_attn.q_proj": linear(queries, hidden),
                "self_attn.k_proj": linear(keys, hidden),
                "self_attn.v_proj": linear(keys, hidden),
                "self_attn.o_proj": linear(hidden, queries),
                "post_attention_layernorm": norm(),
                "mlp.gate_proj": linear(inner, hidden),
                "mlp.up_proj": linear(inner, hidden),
                "mlp.down_proj": linear(hidden, inner),
            }.items()
        }
    tensors["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = linear(config["vocab_size"], hidden)
    return tensors


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_biased_keys(folder: Path, source: Path, bias: np.ndarray) -> Path:
    """Write a Llama checkpoint again as a Qwen 2 whose keys have biases, float32.

    Args:
      folder: where to; it is made.
      source: the Llama's folder, with one file of weights.
      bias: float32[layers, kv_heads * head_dim].
    """
    from safetensors.flax import load_file as load_flax  # NumPy alone has no bfloat16

    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    queries = config["num_attention_heads"] * config["head_dim"]
    tensors = {k: np.asarray(v, np.float32) for k, v in load_flax(source / WEIGHTS).items()}
    for layer, keys in enumerate(bias):
        name = f"model.layers.{layer}.self_attn"
        tensors[f"{name}.q_proj.bias"] = np.zeros(queries, np.float32)
        tensors[f"{name}.k_proj.bias"] = keys.astype(np.float32)
        tensors[f"{name}.v_proj.bias"] = np.zeros_like(keys, np.float32)
    for name in ("attention_bias", "mlp_bias"):
        config.pop(name, None)
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "dtype": "float32"}
    _write_json(folder / "config.json", config)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder
