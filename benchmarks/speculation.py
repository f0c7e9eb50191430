"""What drafts save: `python -m benchmarks.speculation`, and `--engine` of requests to one.

A model of the shape of Llama 135M, whose weights are made such that each token says the next: it
goes round in circles, through tokens in some order. A draft of one narrow layer knows as many of
these steps as it is to agree with. Every way generates the same text, in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks.bandwidth import cpu_name
from benchmarks.claims import paired_ratio
from benchmarks.decode import default_folder
from kvjax import models
from kvjax.memory import InferenceLimits
from kvjax.models.config import LlamaConfig, RopeConfig

AGREED, RANDOM, REPEATED = 1.5, 1 / 1.15, 2.0
"""The least speed, of that without drafts: where 70 % agree, none do, and a text repeats itself."""
SURE = 24
"""The logit of what follows, of which a draft is to be as sure as the model where it is drawn."""
QUIET = 0.01
"""What layers add to the embedding of a token, in the end."""


def config(shape: tuple[int, int, int, int, int], vocab: int) -> LlamaConfig:
    """A Llama with a head of its own, of so many channels, inner ones, layers, heads, and heads of
    keys."""
    hidden, inner, layers, heads, kv = shape
    return LlamaConfig(
        model_type="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv, head_dim=64,
        max_position_embeddings=8192, rms_norm_eps=1e-5, hidden_act="silu",
        tie_word_embeddings=False, qkv_bias=False, output_bias=False, mlp_bias=False,
        qk_norm=False, rope=RopeConfig(), windows=(None,) * layers,
    )  # fmt: skip


def circles(vocab: int, length: int) -> np.ndarray:
    """Of each token the next, in circles of some length."""
    order = np.random.default_rng(1).permutation(vocab)
    following = np.empty(vocab, np.int64)
    for start in range(0, vocab, length):
        circle = order[start : start + length]
        following[circle] = np.roll(circle, -1)
    return following


def model(shape: LlamaConfig, following: np.ndarray, name: str) -> Any:
    """One that says the ``following`` of a token, most of all."""
    architecture = models.Architecture(shape)
    params: Any = architecture.init_params(0)
    rng = np.random.default_rng(2)
    words = rng.standard_normal((shape.vocab_size, shape.hidden_size)).astype(np.float32)
    head = np.zeros_like(words)
    head[following] = words * (SURE / shape.hidden_size)
    decoder = params["model"]
    decoder["embed_tokens"]["weight"] = jnp.asarray(words)
    params["lm_head"]["weight"] = jnp.asarray(head)
    for layer in decoder["layers"].values():
        for part in (layer["self_attn"]["o_proj"], layer["mlp"]["down_proj"]):
            part["weight"] = part["weight"] * QUIET
    nothing = models.GenerationDefaults()
    return kvjax.LanguageModel(shape, params, None, nothing, architecture, name)


def mistaken(following: np.ndarray, share: float) -> np.ndarray:
    """The same with so many right of any twenty tokens on their way, and the others anywhere."""
    rng, wrong, token = np.random.default_rng(3), np.zeros(len(following), bool), 0
    for _ in range(0, len(following), 20):
        for miss in rng.permutation(20) >= round(20 * share):
            wrong[token] = miss
            token = following[token]
    found = following.copy()
    found[wrong] = np.roll(following[wrong], 1)
    return found


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens a second, with every draft in turn with none."""
    vocab, found = given.vocab, []
    long, short = circles(vocab, vocab), circles(vocab, given.circle)
    narrow = config((64, 256, 1, 1, 1), vocab)
    target, round = (model(config(given.shape, vocab), x, "a Llama") for x in (long, short))
    after = short  # what repeats itself has done so once, in its prompt
    cells: list[tuple[str, Any, Any]] = [
        (
            f"a model that agrees in {share:.0%}",
            target,
            model(narrow, mistaken(long, share), "draft"),
        )
        for share in given.shares
    ]
    cells += [
        ("a random model", target, model(narrow, mistaken(long, 0.0), "a random draft")),
        ("lookup, a text that does not repeat itself", target, "lookup"),
        ("lookup, a text that repeats itself", round, "lookup"),
    ]
    cell_of = _engine_cell if given.engine else _cell
    ways = {"greedy": {}, "T=0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 1}}
    for name, lm, draft in cells:
        for rows in given.rows:
            # Of several rows the price is another, and how tokens are drawn the same.
            for way, drawn in list(ways.items())[: 2 if rows == 1 else 1]:
                print(f"{name}, {rows} row(s), {way} ...", file=sys.stderr)
                cell = cell_of(given, lm, draft, rows, drawn, after if lm is round else None)
                print(f"... {cell['speed']:.2f}", file=sys.stderr)
                found.append({"draft": name, "rows": rows, "way": way, **cell})
    return found


def _cell(
    given: argparse.Namespace, lm: Any, draft: Any, rows: int, drawn: dict[str, Any],
    circle: np.ndarray | None = None,
) -> dict[str, Any]:  # fmt: skip
    prompts = _prompts(given, rows, circle)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    results: dict[bool, Any] = {}
    for turn in range(given.rounds + 1):
        for drafted in (False, True):
            result = kvjax.generate(
                lm, prompts, max_new_tokens=given.tokens, draft=draft if drafted else None, **drawn
            )
            results[drafted] = result
            if turn:  # the first one compiles
                seconds[drafted].append(result.stats.decode_seconds)
    with_draft = results[True].stats.speculation
    return {
        "same": results[True].tokens == results[False].tokens,
        "ms": 1e3 * statistics.median(seconds[False]) / given.tokens,
        "ms with": 1e3 * statistics.median(seconds[True]) / given.tokens,
        "speed": paired_ratio(seconds[False], seconds[True]),
        "proposed": with_draft.drafted_tokens,
        "accepted": with_draft.accepted_tokens,
        "passes": with_draft.passes,
        "saved": with_draft.saved_passes,
    }


def _engine_cell(
    given: argparse.Namespace, lm: Any, draft: Any, rows: int, drawn: dict[str, Any],
    circle: np.ndarray | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The same, of as many requests to an engine as it has rows."""
    prompts = _prompts(given, rows, circle)
    limits = InferenceLimits(max_batch_size=rows, max_seq_len=len(prompts[0]) + given.tokens + 1)
    engine = kvjax.Engine(lm, limits=limits, prefill_chunk=64, draft=draft)
    engine.compile()
    seconds: dict[str | None, list[float]] = {"engine": [], None: []}
    texts: dict[str | None, Any] = {}
    for turn in range(given.rounds + 1):
        for drafted in (None, "engine"):
            start = time.perf_counter()
            handles = engine.run(prompts, max_new_tokens=given.tokens, draft=drafted, **drawn)
            if turn:  # the first one may compile
                seconds[drafted].append(time.perf_counter() - start)
            texts[drafted] = [handle.tokens for handle in handles]
    stats, each = engine.stats(), given.rounds + 1
    return {
        "same": texts["engine"] == texts[None],
        "ms": 1e3 * statistics.median(seconds[None]) / given.tokens,
        "ms with": 1e3 * statistics.median(seconds["engine"]) / given.tokens,
        "speed": paired_ratio(seconds[None], seconds["engine"]),
        "proposed": stats.drafted_tokens // each,
        "accepted": stats.accepted_tokens // each,
    }


def _prompts(given: argparse.Namespace, rows: int, circle: np.ndarray | None) -> list[list[int]]:
    """A token each, or once around a circle."""
    start = np.random.default_rng(4).integers(0, given.vocab, (rows, 1))
    for _ in range(0 if circle is None else given.circle):
        assert circle is not None
        start = np.concatenate([start, circle[start[:, -1:]]], axis=1)
    found: list[list[int]] = start.tolist()
    return found


def markdown(results: dict[str, Any]) -> str:
    """The figures as a page."""
    engine = results["engine"]
    return "\n".join(
        [
            "# What drafts save in an engine" if engine else "# What drafts save",
            "",
            f"{results['device']}, JAX {results['versions']['jax']}: float32, {results['tokens']} "
            f"new tokens a row, medians of {results['rounds']} rounds, with and without in turn. "
            "The model has the shape of Llama 135M, and weights made such that a token says the "
            "next; the draft has one layer of 64 channels.",
            "",
            "| draft | rows | drawn | ms a token without | with | speed | proposed | accepted | "
            f"{'' if engine else 'passes | '}the same text |",
            f"| --- | --- | --- | --- | --- | --- | --- | --- | {'' if engine else '--- | '}--- |",
            *(
                f"| {x['draft']} | {x['rows']} | {x['way']} | {x['ms']:.1f} | {x['ms with']:.1f} | "
                f"{x['speed']:.2f} | {x['proposed']} | {x['accepted']} | "
                f"{'' if engine else str(x['passes']) + ' | '}{'yes' if x['same'] else 'no'} |"
                for x in results["cells"]
            ),
            "",
        ]
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a row")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE-jaxVERSION")
    parser.add_argument("--engine", action="store_true", help="requests to an engine")
    parser.add_argument("--quick", action="store_true", help="a tiny model: a trial run")
    given = parser.parse_args(arguments)
    full = {"shape": (576, 1536, 30, 9, 3), "vocab": 49152, "circle": 48,
            "shares": [0.7] if given.engine else [0.9, 0.7, 0.5]}  # fmt: skip
    quick = {"shape": (64, 64, 2, 1, 1), "vocab": 256, "circle": 8, "rows": [1], "shares": [0.7],
             "rounds": 1, "tokens": 32}  # fmt: skip
    for name, value in (full | (quick if given.quick else {})).items():
        setattr(given, name, value)
    return given


def failures(cells: Sequence[dict[str, Any]], full: bool) -> list[str]:
    """What is not as it should be: texts, and at full size the speeds of one row."""
    wrong = [f"another text: {x['draft']}" for x in cells if not x["same"]]
    least = {"70%": AGREED, "random": RANDOM, "that repeats": REPEATED}
    for x in cells if full else ():
        for name, speed in least.items():
            if name in x["draft"] and x["rows"] == 1 and x["speed"] < speed:
                wrong.append(f"{x['draft']}, {x['way']}: {x['speed']:.2f}, below {speed:.2f}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write ``speculation.json`` and ``.md``, of an engine ``speculation-engine``; 1 if a text
    is another one, or one row is slower than it should be."""
    given = parse(arguments)
    device = jax.devices()[0]
    results: dict[str, Any] = {
        "device": cpu_name() if device.platform == "cpu" else device.device_kind,
        "versions": {"kvjax": kvjax.__version__, "jax": jax.__version__},
        **{name: value for name, value in vars(given).items() if name not in ("out", "quick")},
        "cells": measure(given),
    }  # fmt: skip
    out = given.out
    if out is None:
        out = Path(tempfile.mkdtemp()) if given.quick else default_folder(results)
    out.mkdir(parents=True, exist_ok=True)
    name = "speculation-engine" if given.engine else "speculation"
    (out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    page = markdown(results)
    (out / f"{name}.md").write_text(page, encoding="utf-8")
    print(page)
    wrong = failures(results["cells"], not given.quick)
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
