"""What a scan over layers costs: `python -m benchmarks.stacks`.

A decoder of nothing but attention and its weights, its layers one after the other in the program,
or stacked and scanned, in turn at equal lengths; the same without a cache, for a scan copies each
layer's weights on a CPU; and how long both take to compile, of two layers and of thirty.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks.bandwidth import cpu_name
from benchmarks.claims import paired_ratio
from benchmarks.decode import default_folder
from kvjax.memory import ModelShape

CODECS: dict[str, dict[str, Any]] = {"raw": {}, "8 bits": {"bits": 8}, "4 bits": {"bits": 4}}
LIMIT, COMPILED = 1.05, 1.5
FORMS = {"unrolled": False, "stacked": True}


def config(layers: int, given: argparse.Namespace) -> ModelShape:
    """A model of so many layers."""
    heads, kv, dim = given.heads
    width = heads * dim
    return ModelShape(layers, width, 4 * width, heads, kv, dim, 256, dtype="float32")


def weights(layers: int, given: argparse.Namespace, stacked: bool) -> Any:
    """Of each layer: what makes queries, keys and values, and what takes mixtures back."""
    heads, kv, dim = given.heads
    rng = np.random.default_rng(0)
    shapes = (heads * dim, (heads + 2 * kv) * dim), (heads * dim, heads * dim)
    every = [[rng.normal(size=s).astype(np.float32) / 30 for s in shapes] for _ in range(layers)]
    if stacked:
        return [jnp.asarray(np.stack(each)) for each in zip(*every, strict=True)]
    return jax.tree.map(jnp.asarray, every)


def model(given: argparse.Namespace, stacked: bool, attends: bool) -> Callable[..., Any]:
    """A step: hidden states, and the cache."""
    heads, kv, dim = given.heads
    table = kvjax.rotary_table(10000.0 ** (-np.arange(0, dim, 2) / dim))

    def layer(x: Any, call: Any, weight: Any, number: Any) -> Any:
        into, back = weight
        numbers = (x @ into).reshape(*x.shape[:2], -1, dim).swapaxes(1, 2)
        queries, keys, values = jnp.split(numbers, (heads, heads + kv), axis=1)
        if attends:
            mixed, call = call.attend(number, queries, keys, values, rotary=table)
        else:
            mixed = queries + keys.mean() + values.mean()
        return x + mixed.swapaxes(1, 2).reshape(x.shape) @ back, call

    def step(params: Any, x: Any, cache: Any) -> Any:
        call = kvjax.step(cache, 1)
        if stacked:

            def one(carry: Any, xs: Any) -> Any:
                (x, call), (weight, number) = carry, xs
                return layer(x, call, weight, number), None

            every = params, jnp.arange(len(params[0]))
            (x, call), _ = jax.lax.scan(one, (x, call), every)
        else:
            for number, weight in enumerate(params):
                x, call = layer(x, call, weight, number)
        return x, call.done() if attends else cache

    return step


def compiled(
    layers: int, codec: str, given: argparse.Namespace, *, stacked: bool, attends: bool = True,
    filled: int = 0,
) -> tuple[Callable[..., Any], list[Any], float]:  # fmt: skip
    """A step's program, what it is given, and the seconds that it took to be lowered and
    compiled."""
    cache = kvjax.init_cache(
        config(layers, given), kvjax.policy(**CODECS[codec], dtype="float32"), batch=given.rows,
        max_len=given.room, stacked=stacked,
    )  # fmt: skip
    held = jnp.full((given.rows,), filled, jnp.int32)
    cache = replace(cache, length=held, written=jnp.full_like(cache.written, filled))
    params = weights(layers, given, stacked)
    x = jnp.ones((given.rows, 1, config(layers, given).hidden_size))
    step = jax.jit(model(given, stacked, attends), donate_argnums=2)
    began = time.perf_counter()
    program = step.lower(params, x, cache).compile()
    return program, [params, x, cache], time.perf_counter() - began


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a step, all forms in turn."""
    found = []
    for codec in CODECS:
        for filled in given.filled:
            print(f"{codec}, {filled} tokens ...", file=sys.stderr)
            steps = {
                (form, attends): compiled(
                    given.layers, codec, given, stacked=stacked, attends=attends, filled=filled
                )
                for form, stacked in FORMS.items()
                for attends in (True, False)
            }
            seconds: dict[Any, list[float]] = {key: [] for key in steps}
            for turn in range(given.rounds + 1):
                for key, (program, args, _) in steps.items():
                    began = time.perf_counter()
                    for _ in range(given.steps):
                        x, args[2] = program(*args)
                    jax.block_until_ready(x)
                    if turn:  # the first one warms up
                        seconds[key].append((time.perf_counter() - began) / given.steps)
            ms = {key: 1e3 * statistics.median(each) for key, each in seconds.items()}
            of_cache = {form: ms[form, True] - ms[form, False] for form in FORMS}
            found.append(
                {
                    "codec": codec, "filled": filled,
                    **{form: ms[form, True] for form in FORMS},
                    **{f"{form}, no attention": ms[form, False] for form in FORMS},
                    "ratio": paired_ratio(seconds["stacked", True], seconds["unrolled", True]),
                    "of attention": of_cache["stacked"] / of_cache["unrolled"],
                }
            )  # fmt: skip
    return found


def compiling(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds to compile few layers, and many."""
    found = []
    for codec in CODECS:
        for form, stacked in FORMS.items():
            print(f"{codec}, {form}, compiled ...", file=sys.stderr)
            seconds = []
            for layers in given.compiled:
                each = []
                for _ in range(given.compilations):
                    jax.clear_caches()
                    each.append(compiled(layers, codec, given, stacked=stacked)[2])
                seconds.append(statistics.median(each))
            found.append(
                {"codec": codec, "form": form, "seconds": seconds, "ratio": seconds[1] / seconds[0]}
            )
    return found


def markdown(results: dict[str, Any]) -> str:
    """The figures as a page."""
    few, many = results["compiled"]
    heads, kv, dim = results["heads"]
    return "\n".join(
        [
            "# A scan over layers, beside one after the other",
            "",
            f"{results['device']}, JAX {results['versions']['jax']}: {results['layers']} layers of "
            f"{heads} heads of queries and {kv} of keys, {dim} channels, float32, "
            f"{results['rows']} row(s), room for {results['room']:,} tokens; medians of "
            f"{results['rounds']} rounds of {results['steps']} steps, all in turn. A scan copies "
            "weights on a CPU, with or without a cache: the last column leaves that out.",
            "",
            "| codec | tokens held | ms, unrolled | stacked | ratio | no attention | stacked | "
            "ratio of attention |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *(
                f"| {x['codec']} | {x['filled']:,} | {x['unrolled']:.2f} | {x['stacked']:.2f} | "
                f"{x['ratio']:.3f} | {x['unrolled, no attention']:.2f} | "
                f"{x['stacked, no attention']:.2f} | {x['of attention']:.3f} |"
                for x in results["steps_of"]
            ),
            "",
            f"Seconds to lower and compile a step of {few} layers and of {many}:",
            "",
            f"| codec | layers | {few} | {many} | times |",
            "| --- | --- | --- | --- | --- |",
            *(
                f"| {x['codec']} | {x['form']} | {x['seconds'][0]:.2f} | {x['seconds'][1]:.2f} | "
                f"{x['ratio']:.2f} |"
                for x in results["compiling"]
            ),
            "",
        ]
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stacks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a round")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE-jaxVERSION")
    parser.add_argument("--quick", action="store_true", help="a tiny model: a trial run")
    given = parser.parse_args(arguments)
    full = {"layers": 12, "heads": (12, 4, 64), "room": 2048, "filled": [256, 1000, 2000],
            "compiled": [2, 30], "compilations": 3}  # fmt: skip
    quick = {"layers": 2, "heads": (4, 2, 8), "room": 128, "filled": [64], "compiled": [2, 3],
             "compilations": 1, "rounds": 2, "steps": 1}  # fmt: skip
    for name, value in (full | (quick if given.quick else {})).items():
        setattr(given, name, value)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write ``stacks.json`` and ``.md``; 1 if many layers take more than ``COMPILED`` times as
    long to compile stacked as two, or attention over a stack is slower than ``LIMIT`` allows."""
    given = parse(arguments)
    device = jax.devices()[0]
    results: dict[str, Any] = {
        "device": cpu_name() if device.platform == "cpu" else device.device_kind,
        "versions": {"kvjax": kvjax.__version__, "jax": jax.__version__},
        **{name: value for name, value in vars(given).items() if name not in ("out", "quick")},
        "steps_of": measure(given), "compiling": compiling(given),
    }  # fmt: skip
    out = given.out
    if out is None:
        out = Path(tempfile.mkdtemp()) if given.quick else default_folder(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "stacks.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    page = markdown(results)
    (out / "stacks.md").write_text(page, encoding="utf-8")
    print(page)
    slow = max(x["ratio"] for x in results["compiling"] if x["form"] == "stacked") > COMPILED
    slow |= max(x["of attention"] for x in results["steps_of"]) > LIMIT
    return int(not given.quick and slow)


if __name__ == "__main__":
    raise SystemExit(main())
