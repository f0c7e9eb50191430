"""Quality against bytes: kvjax's codecs and Transformers' quantized caches on the same text.

``python -m benchmarks.quality`` measures the embedded model on its held-out text, and with
``--real`` SmolLM2-135M-Instruct on prose (the extra ``real``). ``--peers transformers`` feeds the
same weights the same tokens in Transformers with its quanto and HQQ caches (they need torch,
optimum-quanto and hqq), and ``--peers llama_cpp`` in llama.cpp with its own (gguf and
llama-cpp-python). ``--part validation`` is the text that codec settings are chosen on: there, more
settings are compared.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax

import kvjax
from benchmarks import real
from kvjax import models
from kvjax.codecs import (
    Centered,
    Codebook,
    Codec,
    HalfQuadratic,
    Int8,
    Integer,
    MixedPrecision,
    Rotated,
    TurboQuant,
    Unrotated,
)
from kvjax.models.tiny.data import part_tokens
from kvjax.policies.presets import RAW_SINKS, parse_policy
from kvjax.quality import reports
from kvjax.quality.evaluation import CacheBytes, Quality, compute_quality, evaluate

RESULTS = Path(__file__).parent / "results" / "quality"
TRANSFORMERS: dict[str, Any] = {
    "quanto 4 bits": ("quanto", 4, 0, 0),
    "quanto 4 bits, keys per channel": ("quanto", 4, -1, 0),
    "quanto 2 bits": ("quanto", 2, 0, 0),
    "quanto 2 bits, keys per channel": ("quanto", 2, -1, 0),
    "HQQ 8 bits": ("hqq", 8, 1, 1),
    "HQQ 4 bits": ("hqq", 4, 1, 1),
    "HQQ 2 bits": ("hqq", 2, 1, 1),
    "HQQ 2 bits, keys per channel": ("hqq", 2, 0, 1),
}
"""Backend, bits, and the axes of keys and values, with groups of 64 and a residual of 128."""
RESIDUAL = 128
"""How many tokens a cache of Transformers keeps unquantized until it quantizes all it has."""

LLAMA_CPP: dict[str, Any] = {
    "llama.cpp q8_0": ("q8_0", "q8_0"),
    "llama.cpp q5_1": ("q5_1", "q5_1"),
    "llama.cpp q8_0 keys, q4_0 values": ("q8_0", "q4_0"),
    "llama.cpp q4_1": ("q4_1", "q4_1"),
    "llama.cpp q4_0": ("q4_0", "q4_0"),
}
"""Its types of keys and of values."""

CONTEXT = 2048
FIRST = 64
"""Tokens of Transformers' first call. All later calls have ``RESIDUAL``."""


def candidates() -> dict[str, Any]:
    """The policies that are compared, by name."""
    policies: dict[str, Any] = {name: parse_policy(name) for name in reports.DEFAULT_POLICIES}
    textbook = Int8(per="tensor")
    rotated = Rotated(textbook)
    return {
        **policies,
        "absmax int8 per tensor": kvjax.CachePolicy(keys=textbook, values=textbook),
        "the same, rotated": kvjax.CachePolicy(keys=rotated, values=rotated),
        **{
            f"TurboQuant({bits})": kvjax.CachePolicy(keys=TurboQuant(bits), values=TurboQuant(bits))
            for bits in (4, 3, 2)
        },
    }


def settings() -> dict[str, Any]:
    """The settings that presets were chosen among: bits, what keys and values share scales along,
    what searches, rotates or keeps keys unrotated, and raw first tokens."""
    integer, search, rotated = Integer, HalfQuadratic, Rotated

    def with_zero(bits: int, per: str) -> Integer:
        return integer(bits, per, zero_point=True)

    def centered(codec: Codec) -> Codec:
        return rotated(Centered(codec))

    keys_4, keys_2 = with_zero(4, "channel"), with_zero(2, "channel")
    values_4, values_2 = with_zero(4, "token"), with_zero(2, "token")
    pairs = {
        "8: token, token": (integer(8), integer(8)),
        "8: channel, channel": (integer(8, "channel"), integer(8, "channel")),
        "8: tensor, tensor": (integer(8, "tensor"), integer(8, "tensor")),
        "8: rotated tensor, the same": (rotated(integer(8, "tensor")),) * 2,
        "4: token, token": (values_4, values_4),
        "4: channel, token": (keys_4, values_4),
        "4: channel, channel": (keys_4, keys_4),
        "4: searched channel, searched token": (search(keys_4), search(values_4)),
        "4: rotated token, the same": (rotated(values_4), rotated(values_4)),
        "4 and 2: channel, token": (keys_4, values_2),
        "4 and 2: channel, rotated token": (keys_4, rotated(values_2)),
        "2: channel, token": (keys_2, values_2),
        "2: channel, rotated searched token": (keys_2, rotated(search(values_2))),
        "2: unrotated searched channel, the same values": (
            Unrotated(search(keys_2)), rotated(search(values_2))
        ),
    }  # fmt: skip
    policies = {name: kvjax.CachePolicy(keys=k, values=v) for name, (k, v) in pairs.items()}
    for bits in (4, 3, 2):
        values = rotated(with_zero(bits, "token"))
        channel = with_zero(bits, "channel")
        keys = {
            "channel": channel,
            "rotated channel": rotated(channel),
            "mixed channel": MixedPrecision(channel),
            "rotated centered token": centered(with_zero(bits, "token")),
            "rotated centered codebook": centered(Codebook(bits)),
            "rotated centered codebook, groups of 32": centered(Codebook(bits, group_size=32)),
            "rotated codebook": TurboQuant(bits),
        }
        for name, codec in keys.items():
            policy = kvjax.CachePolicy(keys=codec, values=values, sinks=RAW_SINKS)
            policies[f"{bits}, sinks: {name}, rotated token"] = policy
    return policies


def transformers_quality(
    folder: Path, config: Any, windows: np.ndarray, backend: str, bits: int, axis_key: int,
    axis_value: int,
) -> Quality:  # fmt: skip
    """Figures of a quantized cache of Transformers, as if it were fed token by token.

    It is fed ``RESIDUAL`` tokens at a time, which gives the same: every query sees the same tokens
    unquantized, and the cache quantizes the same tokens at once.

    Windows are rows of one batch. Only HQQ's groups along tokens span rows, so there each window is
    a batch of its own.
    """
    import torch
    from transformers import AutoModelForCausalLM, QuantizedCache

    # quanto compiles a function of its own with the ninja of its environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    spans_rows = backend == "hqq" and 0 in (axis_key, axis_value)
    each = []
    with torch.no_grad():
        for batch in np.split(windows, len(windows)) if spans_rows else [windows]:
            tokens = torch.tensor(batch, dtype=torch.long)
            cache = QuantizedCache(
                backend, model.config, nbits=bits, axis_key=axis_key, axis_value=axis_value,
                q_group_size=64, residual_length=RESIDUAL,
            )  # fmt: skip
            wanted = [log_softmax_of(model(row[None], use_cache=False).logits[0]) for row in tokens]
            # A group along tokens needs so many of them at once; what is fed first is seen raw.
            parts = [tokens[:, :FIRST], *tokens[:, FIRST:].split(RESIDUAL, dim=1)]
            pieces: list[list[np.ndarray]] = [[] for _ in batch]
            done = 0
            for part in parts:
                found = model(part, past_key_values=cache).logits
                end = done + part.shape[1]
                for row, logits in enumerate(found):
                    targets = batch[row, done + 1 : end + 1]
                    pieces[row].append(
                        compared(wanted[row][done:end], log_softmax_of(logits), targets)
                    )
                done = end
            each += [np.concatenate(of_row, axis=1) for of_row in pieces]
    share = (bits + 2 * 16 / 64) / 16  # scales and zero points counted with 16 bits each
    return compute_quality(np.stack(each, axis=1), peer_bytes(share, config))


def transformers_qualities(
    folder: Path, config: Any, windows: np.ndarray, caches: Mapping[str, Any]
) -> Iterator[tuple[str, Quality]]:
    """The figures of each of Transformers' caches, given by its settings in ``TRANSFORMERS``."""
    for name, setting in caches.items():
        yield name, transformers_quality(folder, config, windows, *setting)


def log_softmax_of(logits: Any) -> np.ndarray:
    """Log-probabilities in float32 from Transformers' logits."""
    return logits.float().log_softmax(-1).numpy()


def llama_cpp_qualities(
    folder: Path, config: Any, windows: np.ndarray, caches: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, Quality]]:
    """Compare quantized caches of llama.cpp with its own cache of 16-bit floats. ``caches`` are
    types of keys and of values, by name."""
    from benchmarks import engine_llama_cpp as llama_cpp
    from benchmarks.gguf_file import to_gguf

    each: dict[str, list[np.ndarray]] = {name: [] for name in caches}
    with tempfile.TemporaryDirectory() as work:
        # Of decoded weights: with a file's own, llama.cpp also rounds activations to 8 bits.
        file = Path(work) / "model.gguf"
        to_gguf(folder, file)

        def predictions(window: np.ndarray, keys: str, values: str) -> np.ndarray:
            return log_softmax(llama_cpp.logits(file, window[None], keys, values)[0], axis=-1)

        for window in windows:  # the logits of all of them would not fit in memory
            wanted = predictions(window, "f16", "f16")
            for name, types in caches.items():
                each[name].append(compared(wanted, predictions(window, *types), window[1:]))
    for name, types in caches.items():
        share = sum(llama_cpp.BITS[kind] for kind in types) / 2 / 16
        yield name, compute_quality(np.stack(each[name], axis=1), peer_bytes(share, config))


def compared(true: np.ndarray, other: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """float64[4, targets] for ``compute_quality``, from two log-probabilities float[tokens,
    vocabulary]. There is no target of the last token of a text, which is left out."""
    true, other = (x[: len(targets)].astype(np.float64) for x in (true, other))
    nats = [-np.take_along_axis(x, targets[:, None], axis=-1)[:, 0] for x in (true, other)]
    divergence = (np.exp(true) * (true - other)).sum(-1)
    return np.stack([*nats, divergence, true.argmax(-1) == other.argmax(-1)])


def peer_bytes(share: float, config: Any) -> CacheBytes:
    """Return the bytes of a peer's cache that takes ``share`` of the bytes of a bfloat16 cache."""
    raw = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return CacheBytes(
        share * raw, raw / 32, 0.0, share, CONTEXT, CONTEXT, CONTEXT * share * raw, share
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality")
    parser.add_argument("--part", default="held_out", choices=("held_out", "validation"))
    parser.add_argument(
        "--real", action="store_true", help="SmolLM2 on prose, instead of the embedded model"
    )
    parser.add_argument("--windows", type=int, help="windows of the text; default all")
    parser.add_argument("--peers", nargs="*", default=[], choices=("transformers", "llama_cpp"))
    parser.add_argument("--peer-windows", type=int, help="windows they are fed; default 2, real 8")
    parser.add_argument(
        "--caches", default=[], nargs="*", help="names of the peers' caches; default all"
    )
    parser.add_argument("--only-peers", action="store_true", help="not kvjax's own caches")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    part, title = given.part, f"the embedded model, {given.part.replace('_', '-')} text"
    with tempfile.TemporaryDirectory() as work:
        if given.real:
            part, title = "smollm2", "SmolLM2-135M-Instruct, prose"
            lm = models.load(real.required_file(), dtype="float32")
            lm.save(folder := Path(work) / "checkpoint")
            tokens = real.prose(lm, real.TOKENS)
        else:
            lm = models.load(dtype="float32")
            folder, tokens = Path(lm.source), part_tokens(given.part, lm)
        chosen = settings() if given.part == "validation" else candidates()
        found: dict[str, Quality] = {}
        if not given.only_peers:
            found = evaluate(lm, tokens, chosen, context=CONTEXT, windows=given.windows)
            write(found, given.out, part, "policies", title)
        count = given.peer_windows or (8 if given.real else 2)
        windows = np.reshape(tokens[: count * CONTEXT], (count, CONTEXT))
        if not given.peers:
            return
        ours = found
        if given.only_peers or part == "validation" or windows.size != len(tokens):
            ours = evaluate(lm, windows.reshape(-1).tolist(), candidates(), context=CONTEXT)
        for peer in given.peers:
            results = {f"kvjax {name}": quality for name, quality in ours.items()}
            caches = {"transformers": TRANSFORMERS, "llama_cpp": LLAMA_CPP}[peer]
            if given.caches:
                caches = {name: caches[name] for name in given.caches if name in caches}
            measure = {"transformers": transformers_qualities, "llama_cpp": llama_cpp_qualities}
            for name, quality in measure[peer](folder, lm.config, windows, caches):
                results[name] = quality
                print(name, asdict(quality.overall), flush=True)
                write(results, given.out, part, peer, title)


def write(found: Mapping[str, Quality], folder: Path, part: str, name: str, title: str) -> None:
    """Print a table, and write it to a folder with the figures as JSON and a plot."""
    table = "\n\n".join(
        [
            reports.format_columns(reports.quality_rows(found)),
            reports.format_columns(reports.range_rows(found)),
        ]
    )
    print(table, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(reports.as_dicts(found), indent=1)
    (folder / f"{part}-{name}.json").write_text(text + "\n", encoding="utf-8")
    (folder / f"{part}-{name}.txt").write_text(table + "\n", encoding="utf-8")
    reports.plot_quality(found, folder / f"{part}-{name}.png", title=title)


if __name__ == "__main__":
    main()
