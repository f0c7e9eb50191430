"""What a device of a mesh has to do for a step: `python -m benchmarks.sharding`.

Counted from the compiled programs, on simulated CPU devices, for meshes of 1, 2, 4 and 8 of them:
bytes of weights and cache, operations of matrix products, collectives and their bytes. Nothing is
allocated and nothing is timed. Writes `sharding.json` and `sharding.md`.

`python -m benchmarks.sharding --devices v5e,h200` compiles a step of the Llama-3-8B shape for
meshes of such devices, which need not be here, by their own compilers.
"""

import argparse
import functools
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import kvjax
from benchmarks.programs import collectives, operations
from benchmarks.report import markdown_table
from kvjax.cache.sizes import array_shardings
from kvjax.core.pytree import tree_bytes
from kvjax.memory.device_plan import plan_on
from kvjax.models.architecture import Architecture
from kvjax.models.config import LlamaConfig, RopeConfig

MESHES = (
    {}, {"data": 2}, {"data": 4}, {"data": 8}, {"tensor": 2}, {"tensor": 4}, {"tensor": 8},
    {"sequence": 2}, {"sequence": 4}, {"sequence": 8}, {"data": 2, "tensor": 2, "sequence": 2},
)  # fmt: skip
LINKED = {
    "v5e": (
        {"data": 4}, {"tensor": 4}, {"sequence": 4}, {"data": 2, "tensor": 2},
        {"tensor": 2, "sequence": 2},
    ),
    "h200": (
        {"data": 8}, {"tensor": 8}, {"sequence": 8}, {"data": 2, "tensor": 2, "sequence": 2},
    ),
}  # fmt: skip
"""Meshes of devices that need not be here: a v5e of 2 x 2, and 8 x H200."""
BATCH = 8


def model(layers: int) -> Architecture:
    """A Llama with as many key-value heads as there are devices."""
    return llama(
        vocab_size=32768, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
        dtype="float32",
    )  # fmt: skip


def llama(num_hidden_layers: int, **numbers: Any) -> Architecture:
    """A Llama of these numbers."""
    return Architecture(
        LlamaConfig(
            model_type="llama", num_hidden_layers=num_hidden_layers,
            max_position_embeddings=131072, rms_norm_eps=1e-5, hidden_act="silu", qkv_bias=False,
            output_bias=False, mlp_bias=False, qk_norm=False, rope=RopeConfig(),
            windows=(None,) * num_hidden_layers, **numbers,
        )
    )  # fmt: skip


LLAMA_3_8B = llama(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    dtype="bfloat16",
)  # fmt: skip


def program(layers: int, max_len: int, sizes: dict[str, int]) -> tuple[Any, Any, Any]:
    """A decode step as it is compiled for a mesh, and its parameters and cache as shapes."""
    lm, over = model(layers), kvjax.make_mesh(**sizes)
    make = functools.partial(
        kvjax.init_cache, lm.config, "static", batch=BATCH, max_len=max_len, mesh=over
    )
    cache = jax.eval_shape(make)

    def placed(x: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    there = array_shardings(cache)
    cache = jax.tree.map(placed, cache, there)
    params = jax.tree.map(placed, lm.abstract_params(), lm.param_shardings(over))

    def step(params: Any, token: Any, cache: Any) -> Any:
        logits, cache = lm.apply(params, token, cache)
        return jnp.argmax(logits[:, -1:], axis=-1), cache

    token = jax.ShapeDtypeStruct((BATCH, 1), jnp.int32, sharding=there.length)
    return jax.jit(step, donate_argnums=2).lower(params, token, cache).compile(), params, cache


def device_bytes(tree: Any) -> int:
    """Bytes that a device has of a tree of shapes with shardings."""
    own = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), tree
    )
    return tree_bytes(own)


def measured(sizes: dict[str, int], layers: int, max_len: int) -> dict[str, Any]:
    """The figures of a mesh."""
    compiled, params, cache = program(layers, max_len, sizes)
    half = program(layers // 2, max_len, sizes)[0]
    more, less = ([c.kind for c in collectives(each)] for each in (compiled, half))
    each = {
        kind: (more.count(kind) - less.count(kind)) / (layers - layers // 2) for kind in set(more)
    }
    memory = compiled.memory_analysis()
    return {
        "mesh": sizes,
        "weights": device_bytes(params),
        "cache": device_bytes(cache),
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "operations": operations(compiled),
        "collectives_a_layer": {kind: n for kind, n in each.items() if n},
        "collectives": len(more),
        "collective_bytes": sum(c.bytes for c in collectives(compiled)),
        "largest_collective": max((c.bytes for c in collectives(compiled)), default=0),
    }


def table(found: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of the figures, the first the head."""
    rows = [[
        "mesh", "weights MB", "cache MB", "operations, millions", "collectives a layer",
        "of a step", "their kB", "the largest kB",
    ]]  # fmt: skip
    for each in found:
        names = ", ".join(f"{axis}={size}" for axis, size in each["mesh"].items())
        kinds = ", ".join(f"{n:g} {kind}" for kind, n in each["collectives_a_layer"].items())
        rows.append([
            names or "one device", f"{each['weights'] / 1e6:.1f}", f"{each['cache'] / 1e6:.1f}",
            f"{each['operations'] / 1e6:.1f}", kinds or "none", str(each["collectives"]),
            f"{each['collective_bytes'] / 1e3:.1f}", f"{each['largest_collective'] / 1e3:.1f}",
        ])  # fmt: skip
    return rows


def linked(device: str) -> str:
    """What a compiler of such devices says of a step, a row a mesh and policy."""
    rows = [[
        "mesh", "cache", "weights GB", "cache GB", "temporaries MB", "moves, over the ideal",
        "collectives", "a device sends, kB",
    ]]  # fmt: skip
    for sizes in LINKED[device]:
        for name, bits in (("raw", None), ("4 bits", 4)):
            found = plan_on(
                LLAMA_3_8B, kvjax.policy(bits=bits), batch=BATCH, max_len=8192,
                device=kvjax.make_mesh(**sizes, devices=device),
            )  # fmt: skip
            rows.append([
                ", ".join(f"{axis}={size}" for axis, size in sizes.items()), name,
                f"{found.weights / 1e9:.2f}", f"{found.cache['device'] / 1e9:.2f}",
                f"{found.temporaries / 1e6:.0f}",
                f"{found.bytes_moved / found.min_bytes_moved:.3f}", str(found.collectives),
                f"{found.bytes_sent / 1e3:,.0f}",
            ])  # fmt: skip
            print(device, *rows[-1], flush=True)
    return "\n".join(markdown_table(rows[0], rows[1:]))


def of_absent(devices: list[str]) -> None:
    """Compile for meshes of these devices, and write what is found."""
    folder = Path(__file__).parent / "results" / "abstract-devices"
    for device in devices:
        text = (
            f"# A step on meshes of {device}, compiled, of which nothing ran, JAX "
            f"{jax.__version__}\n\n`python -m benchmarks.sharding --devices {device}`: the "
            f"Llama-3-8B shape, {BATCH} rows behind 8,192 tokens. All of one device; temporaries "
            "are those of 512 tokens of a prompt.\n\n"
        )
        (folder / f"sharding-{device}.md").write_text(
            text + linked(device) + "\n", encoding="utf-8"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", help="kinds of devices that need not be here: v5e,h200")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--max-len", type=int, default=32768)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/simulated-devices"))
    options = parser.parse_args()
    if options.devices:
        of_absent(options.devices.split(","))
        return
    found = [measured(sizes, options.layers, options.max_len) for sizes in MESHES]
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {"jax": jax.__version__, "layers": options.layers, "max_len": options.max_len}
    report = {"settings": settings | {"batch": BATCH}, "meshes": found}
    (options.out / "sharding.json").write_text(
        json.dumps(report, indent=1) + "\n", encoding="utf-8"
    )
    text = (
        f"# A step on simulated devices, JAX {jax.__version__}\n\n`python -m benchmarks.sharding`: "
        f"a Llama of {options.layers} layers, hidden size 1,024, 16 heads, 8 of keys and values, "
        f"{BATCH} rows, room for {options.max_len:,} tokens, float32. Of one device, counted from "
        "the compiled program; operations as if the cache were full.\n\n"
    )
    head, *body = (f"| {' | '.join(row)} |" for row in table(found))
    rows = "\n".join([head, "|" + " --- |" * len(table(found)[0]), *body])
    (options.out / "sharding.md").write_text(text + rows + "\n", encoding="utf-8")
    print(rows)


if __name__ == "__main__":
    main()
