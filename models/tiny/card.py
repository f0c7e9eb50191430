"""Generation of the model card from the measured numbers."""

from pathlib import Path

from kvjax.core.typing import Json

from .recipe import Recipe


def write_card(figures: Json, recipe: Recipe, file: Path) -> None:
    """Write the model card, ``README.md``."""
    file.write_text(_card(figures, recipe), encoding="utf-8")


def _card(figures: Json, recipe: Recipe) -> str:
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

A small language model trained on Python's documentation. It lets you try and measure everything in
kvjax offline, on a CPU, with trained weights. It imitates the style and vocabulary of the
documentation, but it does not know facts: do not rely on what it says about Python.

| | |
| --- | --- |
| family | Llama: grouped-query attention, rotary positions, gated feed-forward, tied embeddings |
| parameters | {figures["parameters"]:,} in bfloat16 |
| layers, hidden, feed-forward | {recipe.layers}, {recipe.hidden_size}, {recipe.intermediate_size} |
| query heads, key-value heads, head size | {recipe.heads}, {recipe.kv_heads}, {recipe.head_dim} |
| vocabulary | {figures["vocab_size"]:,}, byte-level BPE; `<|endoftext|>` (id 0) begins a document |
| context | {figures["context"]:,} tokens: the length of every training window |

The folder is in the Transformers format: `kvjax.models.load()` reads it, and so do
`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`. The tokenizer does not
add a BOS token: training windows start anywhere in a document, and so can prompts.

## Held-out figures

Measured on {parts["held_out"]["documents"]} documents ({parts["held_out"]["bytes"]:,} bytes, \
{parts["held_out"]["tokens"]:,} tokens) that were not used for training. Every token is predicted
except the `<|endoftext|>` at the start of a document. Windows of {figures["context"]:,} tokens \
start every
{figures["stride"]} tokens, so every token after a document's first window has at least \
{figures["context"] - figures["stride"]:,} tokens
of context. The baselines use the same training tokens: unigram frequencies with add-one smoothing,
and a trigram model with interpolated modified Kneser-Ney smoothing.

| | nats per token | perplexity per token | bits per byte |
| --- | --- | --- | --- |
{_row("unigram", figures["unigram"])}
{_row("trigram", figures["trigram"])}
{_row("**this model**", model)}

The documentation differs slightly between Python versions. These figures are for Python
{figures["python"]}.{_others(figures)}

## Loss by position

The same held-out tokens, with increasing context:

{_positions(figures["position_bucket"], figures["nats_by_position"])}

{_how_far(figures["position_bucket"], figures["nats_by_position"])}

Only the tokens that have a full context before them:

{_positions(figures["wide_bucket"], figures["nats_by_wide_position"])}

{_how_far(figures["wide_bucket"], figures["nats_by_wide_position"])}

## Text

Samples at temperature 0.7 and top-p 0.95, from one seed, not selected. Each follows its prompt.

{_samples(figures)}
## Training data

The text is read from the running CPython, and no copy is kept here: the topics of
`pydoc_data.topics`, and the docstrings and signatures of the standard library, from its source
files and extension modules (without tests). Each topic is a document, and so is each top-level
module with its submodules. [`split.json`](split.json) assigns the documents to training,
validation and held-out text. Whole packages stay together, so held-out text has no closely related
text in training. An entry is dropped if half of its five-word shingles occur in earlier entries of
any part. This leaves {parts["train"]["bytes"] / 1e6:.2f} MB in {parts["train"]["documents"]} \
documents for training
({parts["train"]["tokens"]:,} tokens), and {parts["validation"]["bytes"]:,} bytes for validation. \
The text is © Python
Software Foundation and its contributors, under the PSF License.

## Training

    python -m kvjax.models.tiny.train       # resumes from the last checkpoint if interrupted
    python -m kvjax.models.tiny.evaluation  # measures the model and writes this card

{recipe.steps:,} steps of {recipe.rows * recipe.context:,} tokens, windows of {recipe.context:,}: \
{seen / 1e6:.1f} million tokens, {epochs:.1f} epochs, in float32 on two CPU cores. The optimizer
is Muon for matrices (learning rate {recipe.matrix_rate}) and AdamW for the rest (learning rate
{recipe.other_rate}), with {recipe.warmup} warm-up steps, linear decay to zero over the last
{recipe.decay:.0%} of the steps, and weight decay {recipe.weight_decay}. Each epoch shuffles the
documents, cuts windows at new offsets, and replaces {recipe.renamed:.0%} of a document's rare words
by other words, consistently within the document. {recipe.repeated:.0%} of the windows contain a
passage twice. This makes the model look names up in its context instead of memorizing them
([`augment.py`](augment.py)). The final validation loss, on unmodified text, is
{figures["validation_nats_per_token"]:.3f} nats per token.

![loss](loss.png)

## Limits

The model was trained on 2.5 MB of text. It invents functions, arguments and behavior. Long outputs
drift and repeat themselves. It can't handle other subjects, or languages other than English. Use it
to test caches, not to answer questions.
"""


def _row(name: str, values: dict[str, float]) -> str:
    return (
        f"| {name} | {values['nats_per_token']:.3f} | {values['perplexity']:.1f} "
        f"| {values['bits_per_byte']:.3f} |"
    )


def _others(figures: Json) -> str:
    others = figures.get("other_versions", {})
    if not others:
        return ""
    listed = ", ".join(f"{nats:.3f} on Python {version}" for version, nats in others.items())
    return f" The model's nats per token are {listed}."


def _positions(bucket: int, losses: list[float]) -> str:
    rows = ["| tokens of context | nats per token | change |", "| --- | --- | --- |"]
    for i, nats in enumerate(losses):
        change = f"{nats - losses[i - 1]:+.4f}" if i else ""
        rows.append(f"| {i * bucket + 1:,} to {(i + 1) * bucket:,} | {nats:.4f} | {change} |")
    return "\n".join(rows)


def _how_far(bucket: int, losses: list[float]) -> str:
    best = losses.index(min(losses))
    reached = f"The loss decreases up to {(best + 1) * bucket:,} tokens of context"
    if best == len(losses) - 1:
        return f"{reached}, the last row of the table."
    rise = max(losses[best:]) - losses[best]
    return f"{reached}, and is at most {rise:.4f} higher after that."


def _samples(figures: Json) -> str:
    blocks = []
    for sample in figures["samples"]:
        text = (sample["prompt"] + sample["text"]).rstrip()
        blocks.append(f"`{sample['prompt']!r}`\n\n```text\n{text}\n```\n\n")
    return "".join(blocks)
