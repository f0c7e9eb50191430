"""Tokens per second of Transformers: `benchmarks.tokens` runs it in a process of its own.

A Llama model with random weights, a dynamic cache and the default attention. It prints one line of
JSON: the figures, or the `reason` for none.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def run(given: dict[str, Any]) -> dict[str, Any]:
    """Decode greedily after random prompts."""
    cuda = torch.cuda.is_available()
    if not cuda and not given["on_cpu"]:
        return {"reason": "torch sees no GPU"}
    dtype = torch.float32
    if cuda:
        # A T4 has no bfloat16 arithmetic.
        ampere = torch.cuda.get_device_capability() >= (8, 0)
        dtype = torch.bfloat16 if ampere else torch.float16
    names = (
        "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size",
    )  # fmt: skip
    shape = given["shape"]
    config = transformers.LlamaConfig(
        **{name: shape[name] for name in names}, tie_word_embeddings=shape["tied"],
        max_position_embeddings=shape["context"],
    )  # fmt: skip
    torch.set_default_dtype(dtype)
    with torch.device("cuda" if cuda else "cpu"), torch.inference_mode():
        model = transformers.LlamaForCausalLM(config).eval()
        prompt = torch.randint(shape["vocab_size"], (given["batch"], given["prompt"]))
        cache = transformers.DynamicCache(config=config)

        def step(tokens: Any) -> Any:
            found = model(input_ids=tokens, past_key_values=cache, logits_to_keep=1)
            return found.logits[:, -1].argmax(-1, keepdim=True)

        token, seconds = step(prompt), []
        for _ in range(given["repeats"] + 1):
            start = time.perf_counter()
            for _ in range(given["steps"]):
                token = step(token)
            token.tolist()  # it waits for the device
            seconds.append(time.perf_counter() - start)
            cache.crop(-given["steps"])
    each = statistics.median(seconds[1:]) / given["steps"]
    return {
        "tokens_per_second": given["batch"] / each,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
