"""The model card, made from the figures."""

from pathlib import Path
from typing import Any

from .recipe import Recipe


def write_card(figures: dict[str, Any], recipe: Recipe, file: Path) -> None:
    """Write ``README.md`` of the model's folder."""
    file.write_text(_card(figures, recipe), encoding="utf-8")


def _card(figures: dict[str, Any], recipe: Recipe) -> str:
    parts, model = figures["parts"], figures["model"]
    seen = recipe.steps * recipe.rows * recipe.context
    epochs = seen / parts["train"]["tokens"]
    return f"""\
---
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The embedded model of kvjax

A small language model of Python's documentation, so that everything in kvjax can be tried and
measured offline, on a CPU, with weights that were really trained. It knows the form and the words
of the documentation. It knows no facts: do not believe what it says about Python.

| | |
| --- | --- |
| family | Llama: grouped-query attention, rotary positions, gated feed-forward, tied embeddings |
| parameters | {figures["parameters"]:,} in bfloat16 |
| layers, hidden, feed-forward | {recipe.layers}, {recipe.hidden_size}, {recipe.intermediate_size} |
| query heads, key-value heads, head size | {recipe.heads}, {recipe.kv_heads}, {recipe.head_dim} |
| vocabulary | {figures["vocab_size"]:,}, byte-level BPE; `<|endoftext|>` (id 0) begins a document |
| context | {figures["context"]:,} tokens: the length of every training window |

The folder is in the Transformers format: `kvjax.models.load()` reads it, and so do
`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`. The tokenizer puts
nothing before a text: training windows begin anywhere in a document, and so may prompts.

## Held-out figures

On {parts["held_out"]["documents"]} documents ({parts["held_out"]["bytes"]:,} bytes, \
{parts["held_out"]["tokens"]:,} tokens) that it was not trained on. Every token is predicted but
the `<|endoftext|>` that begins a document; windows of {figures["context"]:,} tokens begin
every {figures["stride"]}, so that after a document's first window at least \
{figures["context"] - figures["stride"]:,} tokens
precede each. The baselines learned from the same training tokens: unigram frequencies plus one,
and a trigram model with interpolated modified Kneser-Ney smoothing.

| | nats a token | perplexity a token | bits a byte |
| --- | --- | --- | --- |
{_row("unigram", figures["unigram"])}
{_row("trigram", figures["trigram"])}
{_row("**this model**", model)}

The text depends a little on the version of Python that it is read from; these figures are from
Python {figures["python"]}.{_others(figures)}

## Loss by position

The same held-out tokens, with more and more of the text before them:

{_positions(figures["position_bucket"], figures["nats_by_position"])}

{_how_far(figures["position_bucket"], figures["nats_by_position"])}

Those of them that have the whole context before them:

{_positions(figures["wide_bucket"], figures["nats_by_wide_position"])}

{_how_far(figures["wide_bucket"], figures["nats_by_wide_position"])}

## Text

At temperature 0.7 and top-p 0.95, with one seed; not selected. The prompt stands above each.

{_samples(figures)}
## Training data

What every CPython carries and no copy of which is kept here: the topics of `pydoc_data.topics`,
and the docstrings and signatures of the standard library, read from its source files and from its
extension modules (without tests). Each topic, and each top-level module with its submodules, is
one document in the form that the topics have. [`split.json`](split.json) names the documents of
each part; whole packages stay together, so that no held-out text has a sibling in training.
Entries of which half the five-word shingles stand in an entry before, in whatever part, are
dropped: {parts["train"]["bytes"] / 1e6:.2f} MB in {parts["train"]["documents"]} documents are left
to train on ({parts["train"]["tokens"]:,} tokens), and {parts["validation"]["bytes"]:,} bytes to
watch the training with. The text is © Python Software Foundation and its contributors, under the
PSF License.

## Training

    python -m kvjax.models.tiny.train       # again after a stop: goes on from its last checkpoint
    python -m kvjax.models.tiny.evaluation  # measures, and writes this card

{recipe.steps:,} steps of {recipe.rows * recipe.context:,} tokens, windows of {recipe.context:,}: \
{seen / 1e6:.1f} million tokens, {epochs:.1f} passes over the text, in float32 on two processor
cores. Muon for the matrices (rate {recipe.matrix_rate}) and AdamW for the rest (rate
{recipe.other_rate}), {recipe.warmup} steps of warm-up, a linear fall to zero over the last
{recipe.decay:.0%} of the steps, weight decay {recipe.weight_decay}. Every pass takes the documents
in a new order, cuts them at new places, and gives {recipe.renamed:.0%} of a document's rare words
other names, the same throughout the document; {recipe.repeated:.0%} of the windows hold a stretch
of themselves twice: names must be looked up in the text, not known by heart
([`augment.py`](augment.py)). The validation loss, on text as it is, is
{figures["validation_nats_per_token"]:.3f} nats a token at the end.

![loss](loss.png)

## Limits

It was trained on two and a half megabytes. It invents functions, arguments and
behaviour; longer texts drift and repeat themselves; other subjects and other languages than
English are beyond it. Use it to test caches, not to answer questions.
"""


def _row(name: str, values: dict[str, float]) -> str:
    return (
        f"| {name} | {values['nats_per_token']:.3f} | {values['perplexity']:.1f} "
        f"| {values['bits_per_byte']:.3f} |"
    )


def _others(figures: dict[str, Any]) -> str:
    others = figures.get("other_versions", {})
    if not others:
        return ""
    listed = ", ".join(f"{nats:.3f} on Python {version}" for version, nats in others.items())
    return f" The model's nats a token are {listed}."


def _positions(bucket: int, losses: list[float]) -> str:
    rows = ["| tokens before | nats a token | against the row above |", "| --- | --- | --- |"]
    for i, nats in enumerate(losses):
        change = f"{nats - losses[i - 1]:+.4f}" if i else ""
        rows.append(f"| {i * bucket + 1:,} to {(i + 1) * bucket:,} | {nats:.4f} | {change} |")
    return "\n".join(rows)


def _how_far(bucket: int, losses: list[float]) -> str:
    best = losses.index(min(losses))
    reached = f"The loss falls up to {(best + 1) * bucket:,} tokens"
    if best == len(losses) - 1:
        return f"{reached}, the last row of the table."
    rise = max(losses[best:]) - losses[best]
    return f"{reached}, and is at most {rise:.4f} higher behind that."


def _samples(figures: dict[str, Any]) -> str:
    blocks = []
    for sample in figures["samples"]:
        text = (sample["prompt"] + sample["text"]).rstrip()
        blocks.append(f"`{sample['prompt']!r}`\n\n```text\n{text}\n```\n\n")
    return "".join(blocks)
