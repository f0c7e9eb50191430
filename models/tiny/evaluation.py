"""Measure the embedded model on held-out text and write its card: ``python -m
kvjax.models.tiny.evaluation``.

The figures are written to ``figures.json``, and ``README.md`` is generated from that file.
"""

import argparse
import functools
import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from kvjax.core.typing import Array, Json
from kvjax.generation.loaded_model import LanguageModel

from ..architecture import Architecture, Params
from ..loading import load
from .card import write_card
from .corpus import PARTS, read_parts
from .data import encode
from .recipe import Recipe
from .train import token_losses

POSITIONS, BUCKET = 1024, 128
"""The maximum context of the loss by position, and the size of its buckets, in tokens."""
WIDE_BUCKET = 256
"""The bucket size for the loss by position over the full context."""
STRIDE = 512
"""The distance between the windows on which perplexity is measured, in tokens."""
SPOT = ("module:socketserver", "module:textwrap", "topic:import")
"""Documents that are identical in several Python versions. A test measures their loss again."""
PROMPTS = (
    "The function returns",
    "class collections.OrderedDict(dict)",
    "If the file does not exist,",
)


@dataclass(frozen=True)
class Losses:
    """The losses of all tokens of some documents, except each document's first token.

    ``losses`` is float64[tokens], in nats. ``text_bytes`` is the size of the documents in UTF-8, in
    bytes.
    """

    losses: np.ndarray
    text_bytes: int

    def figures(self) -> dict[str, float]:
        """Return the mean nats per token, the perplexity per token, and the bits per byte."""
        nats = float(self.losses.mean())
        bits = float(self.losses.sum()) / math.log(2) / self.text_bytes
        return {
            "nats_per_token": round(nats, 4),
            "perplexity": round(math.exp(nats), 2),
            "bits_per_byte": round(bits, 4),
        }


def window_losses(
    architecture: Architecture, params: Params, windows: np.ndarray, *, rows: int = 4
) -> np.ndarray:
    """Return the loss of each token after the first in each window, float32[windows, length -
    1]."""
    run = _compiled(architecture)
    parts = []
    for start in range(0, len(windows), rows):
        batch = windows[start : start + rows]
        padded = np.pad(batch, ((0, rows - len(batch)), (0, 0)))
        parts.append(np.asarray(run(params, jnp.asarray(padded)))[: len(batch)])
    return np.concatenate(parts)


@functools.lru_cache(maxsize=8)
def _compiled(architecture: Architecture) -> Callable[[Params, Array], Array]:
    return jax.jit(functools.partial(token_losses, architecture))


def document_losses(
    lm: LanguageModel, documents: Sequence[np.ndarray], context: int, stride: int = STRIDE
) -> np.ndarray:
    """Return the loss, in nats, of each token except each document's first. After a document's
    first window, every token has at least ``context - stride`` tokens of context."""
    windows, spans = [], []
    for document in documents:
        end = 1
        for start in range(0, len(document), stride):
            stop = min(start + context + 1, len(document))
            if stop <= end:
                break
            window = document[start:stop]
            windows.append(np.pad(window, (0, context + 1 - len(window))))
            spans.append((end - start - 1, stop - start - 1))
            end = stop
    losses = window_losses(lm.architecture, lm.params, np.stack(windows))
    return np.concatenate(
        [row[first:last] for row, (first, last) in zip(losses, spans, strict=True)]
    ).astype(np.float64)


def position_losses(
    lm: LanguageModel, documents: Sequence[np.ndarray], context: int, bucket: int = BUCKET
) -> np.ndarray:
    """Compute the mean loss by context length, on the same tokens for every length.

    Windows start at every multiple of ``bucket``, so each token is in every bucket once. Tokens
    that are too close to the start of their document are left out.

    Returns:
      float64[context // bucket], in nats. The first element is for 1 to ``bucket`` tokens of
      context.
    """
    buckets = context // bucket
    windows, counted = [], []
    for document in documents:
        runs = (len(document) - 1) // bucket  # complete buckets of targets, from token 1
        for start in range(runs if runs >= buckets else 0):
            window = document[start * bucket :][: context + 1]
            windows.append(np.pad(window, (0, context + 1 - len(window))))
            # Bucket b of this window contains run start + b.
            counted.append([buckets - 1 <= start + b < runs for b in range(buckets)])
    if not windows:
        raise ValueError(f"no document is longer than {context} tokens")
    losses = window_losses(lm.architecture, lm.params, np.stack(windows))
    means = losses.reshape(len(windows), buckets, bucket).astype(np.float64).mean(-1)
    weights = np.array(counted, np.float64)
    return (means * weights).sum(0) / weights.sum(0)


def spot_losses(lm: LanguageModel, documents: Sequence[np.ndarray]) -> float:
    """Return the mean nats per token over the first ``POSITIONS`` tokens of each document."""
    length = POSITIONS + 1
    windows = np.stack([document[:length] for document in documents])
    return float(window_losses(lm.architecture, lm.params, windows).mean())


def figures(lm: LanguageModel) -> Json:
    """Measure all figures of the model card."""
    from kvjax.generation.generator import generate

    texts = read_parts()
    backend = _backend(lm)
    tokens = {part: encode(backend, texts[part]) for part in PARTS}
    sizes = {
        part: {
            "documents": len(tokens[part]),
            "bytes": sum(len(text.encode()) for text in texts[part].values()),
            "tokens": sum(map(len, tokens[part])),
        }
        for part in PARTS
    }
    context, vocab_size = lm.config.max_position_embeddings, lm.config.vocab_size
    held_out = tokens["held_out"]

    def measured(losses: np.ndarray) -> dict[str, float]:
        return Losses(losses, sizes["held_out"]["bytes"]).figures()

    spot = encode(backend, {name: texts["held_out"][name] for name in SPOT})
    validation = document_losses(lm, tokens["validation"], context)
    by_position = position_losses(lm, held_out, POSITIONS)
    wide = position_losses(lm, held_out, context, WIDE_BUCKET)
    samples = generate(lm, list(PROMPTS), max_new_tokens=160, temperature=0.7, top_p=0.95, seed=1)
    return {
        "python": platform.python_version(),
        "parameters": sum(x.size for x in jax.tree.leaves(lm.params)),
        "context": context,
        "stride": STRIDE,
        "vocab_size": vocab_size,
        "parts": sizes,
        "model": measured(document_losses(lm, held_out, context)),
        "validation_nats_per_token": round(float(validation.mean()), 4),
        "trigram": measured(trigram_losses(tokens["train"], held_out, vocab_size)),
        "unigram": measured(unigram_losses(tokens["train"], held_out, vocab_size)),
        "spot": {"documents": SPOT, "nats_per_token": round(spot_losses(lm, spot), 4)},
        "position_bucket": BUCKET,
        "nats_by_position": [round(float(x), 4) for x in by_position],
        "wide_bucket": WIDE_BUCKET,
        "nats_by_wide_position": [round(float(x), 4) for x in wide],
        "samples": [
            {"prompt": prompt, "text": text}
            for prompt, text in zip(PROMPTS, samples.text, strict=True)
        ],
    }


def _held_out_nats(lm: LanguageModel) -> float:
    documents = encode(_backend(lm), read_parts()["held_out"])
    losses = document_losses(lm, documents, lm.config.max_position_embeddings)
    return round(float(losses.mean()), 4)


def _backend(lm: LanguageModel) -> tokenizers.Tokenizer:
    if lm.tokenizer is None:
        raise ValueError(f"{lm.source} has no tokenizer")
    return lm.tokenizer.backend


def main() -> None:
    folder = Path(__file__).parent
    parser = argparse.ArgumentParser(prog="python -m kvjax.models.tiny.evaluation")
    parser.add_argument("--folder", type=Path, default=folder, help="the model (%(default)s)")
    parser.add_argument(
        "--add",
        action="store_true",
        help="only add this Python version's held-out loss to the existing figures",
    )
    options = parser.parse_args()
    folder, lm = options.folder, load(options.folder)
    if options.add:
        result = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
        version = ".".join(platform.python_version_tuple()[:2])
        result.setdefault("other_versions", {})[version] = _held_out_nats(lm)
    else:
        result = figures(lm)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    (folder / "figures.json").write_text(text + "\n", encoding="utf-8")
    write_card(result, Recipe(), folder / "README.md")
    print(json.dumps({k: v for k, v in result.items() if k != "samples"}, indent=1))


ORDER = 3


def unigram_losses(
    train: Sequence[np.ndarray], test: Sequence[np.ndarray], vocab_size: int
) -> np.ndarray:
    """Return the nats of each test token except a document's first, under add-one unigram
    frequencies."""
    counts = np.bincount(np.concatenate([d[1:] for d in train]), minlength=vocab_size) + 1.0
    return -np.log(counts / counts.sum())[np.concatenate([d[1:] for d in test])]


def trigram_losses(
    train: Sequence[np.ndarray], test: Sequence[np.ndarray], vocab_size: int
) -> np.ndarray:
    """Return the nats of each test token except a document's first, under a modified Kneser-Ney
    trigram model.

    The model is interpolated, with three discounts per order computed from the counts of counts.
    The lowest order is a uniform distribution (Chen and Goodman, An Empirical Study of Smoothing
    Techniques for Language Modeling, Harvard TR-10-98).

    Args:
      train, test: documents as int arrays. All start with the same token, which also pads the
        context before it.
      vocab_size: the number of tokens in the vocabulary.
    """
    grams = np.concatenate([_grams(document) for document in train])
    queries = np.concatenate([_grams(document) for document in test])
    probability = np.full(len(queries), 1.0 / vocab_size)
    for order in range(1, ORDER + 1):
        if order == ORDER:
            units, counts = np.unique(_pack(grams, vocab_size, ORDER), return_counts=True)
        else:
            # Lower orders count the distinct tokens that precede an n-gram, not its occurrences.
            longer = np.unique(_pack(grams, vocab_size, order + 1))
            units, counts = np.unique(longer % vocab_size**order, return_counts=True)
        probability = _interpolate(
            units, counts, _pack(queries, vocab_size, order), vocab_size, probability
        )
    return -np.log(probability)


def _interpolate(
    units: np.ndarray, counts: np.ndarray, queries: np.ndarray, vocab_size: int, lower: np.ndarray
) -> np.ndarray:
    """Return the probabilities of the n-grams ``queries``, interpolated with ``lower``, the
    probabilities of shorter n-grams."""
    n1, n2, n3, n4 = (max(1, int((counts == n).sum())) for n in (1, 2, 3, 4))
    share = n1 / (n1 + 2 * n2)
    discounts = np.array(
        [0.0, 1 - 2 * share * n2 / n1, 2 - 3 * share * n3 / n2, 3 - 4 * share * n4 / n3]
    ).clip(0.0, None)
    contexts, context = np.unique(units // vocab_size, return_inverse=True)
    total = np.bincount(context, weights=counts)
    taken = discounts[np.minimum(counts, 3)]
    freed = np.bincount(context, weights=taken) / total
    kept = (counts - taken) / total[context]

    known, at = _find(units, queries)
    seen, which = _find(contexts, queries // vocab_size)
    own = np.where(known, kept[at], 0.0)
    return np.where(seen, own + freed[which] * lower, lower)


def _find(values: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at = np.searchsorted(values, queries).clip(0, len(values) - 1)
    return values[at] == queries, at


def _grams(document: np.ndarray) -> np.ndarray:
    """Return each token after the first, with the two tokens before it, [tokens - 1, 3]."""
    past = np.concatenate([np.repeat(document[:1], ORDER - 2), document])
    return np.stack([past[i : len(past) - ORDER + 1 + i] for i in range(ORDER)], axis=1)


def _pack(grams: np.ndarray, vocab_size: int, order: int) -> np.ndarray:
    packed = np.zeros(len(grams), np.int64)
    for column in range(ORDER - order, ORDER):
        packed = packed * vocab_size + grams[:, column]
    return packed


if __name__ == "__main__":
    main()
