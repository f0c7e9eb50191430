"""The embedded model: its corpus, its recipe, its files and its figures."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models import tiny
from kvjax.models.tiny import corpus, data, evaluation, recipe, train
from tests.texts import parts as parts_of_the_corpus

FOLDER = Path(tiny.__file__).parent
FIGURES = json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))

TOLERANCE = 0.05
"""Nats a token by which held-out losses may differ from the card's: docstrings of Python 3.11 to
3.13 differ, and so do roundings of processors."""


@pytest.fixture(scope="module")
def parts():
    return parts_of_the_corpus()


@pytest.fixture(scope="module")
def held_out(parts, embedded):
    names = FIGURES["spot"]["documents"]
    texts = {name: parts["held_out"][name] for name in names}
    return data.encode(embedded.tokenizer.backend, texts)


def test_split_names_each_document_once():
    split = corpus.read_split()
    assert set(split) == set(corpus.PARTS)
    names = [name for part in split.values() for name in part]
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_parts_are_those_of_the_card(parts):
    for part, texts in parts.items():
        there = FIGURES["parts"][part]
        assert len(texts) == pytest.approx(there["documents"], rel=0.15)
        assert sum(len(t.encode()) for t in texts.values()) == pytest.approx(
            there["bytes"], rel=0.15
        )


def test_no_held_out_paragraph_is_nearly_in_training(parts):
    """Here by paragraph and against the whole of training, where the corpus goes by entry."""
    paragraphs = [
        own
        for text in parts["held_out"].values()
        for paragraph in text.split("\n\n")
        if len(own := corpus.shingles(paragraph)) >= 10
    ]
    seen = set().union(*map(corpus.shingles, parts["train"].values()))
    shares = np.array([len(own & seen) / len(own) for own in paragraphs])
    assert len(shares) > 500
    assert (shares > 0.5).mean() < 0.02
    assert shares.mean() < 0.05


def test_near_duplicates_are_dropped(monkeypatch):
    words = [f"word{i}" for i in range(40)]
    entry = " ".join(words)
    changed = " ".join([*words[:38], "other", "end"])
    other = " ".join(f"thing{i}" for i in range(40))
    split = {"train": ["a", "b"], "validation": [], "held_out": ["c"]}
    monkeypatch.setattr(corpus, "read_split", lambda: split)
    documents = {"a": [entry, other], "b": [changed, other], "c": [changed, "new " * 60]}
    found = corpus.read_parts(documents)
    assert found["train"] == {"a": f"{entry}\n\n{other}\n"}
    assert list(found["held_out"].values()) == ["new " * 60 + "\n"]


def test_folder_is_small_and_complete(embedded):
    files = [f for f in FOLDER.iterdir() if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 16 * 2**20
    assert not [f.name for f in files if f.name.endswith(".unfinished")]
    config = embedded.config
    assert config.head_dim == 64
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings >= 1024
    assert embedded.tokenizer.vocab_size == config.vocab_size
    assert embedded.architecture.config == config
    assert recipe.Recipe().config().num_hidden_layers == config.num_hidden_layers


def test_tokenizer_gives_any_text_back(embedded):
    text = "def f(x):\n\treturn 'naïve 日本語 😀'\n\n   See also: os.path"
    assert embedded.tokenizer.decode(embedded.tokenizer.encode(text)) == text


def test_card_says_what_was_measured():
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in ("unigram", "trigram", "model"):
        assert f"{FIGURES[name]['perplexity']:.1f}" in card
    by_position = [*FIGURES["nats_by_position"], *FIGURES["nats_by_wide_position"]]
    assert all(f"{nats:.4f}" in card for nats in by_position)
    assert FIGURES["model"]["perplexity"] < 0.5 * FIGURES["trigram"]["perplexity"]
    assert FIGURES["trigram"]["perplexity"] < FIGURES["unigram"]["perplexity"]


@pytest.mark.slow
def test_held_out_loss_is_that_of_the_card(embedded, held_out):
    losses = evaluation.spot_losses(embedded, held_out)
    assert losses == pytest.approx(FIGURES["spot"]["nats_per_token"], abs=TOLERANCE)


@pytest.mark.rare
def test_loss_falls_with_position(embedded, held_out):
    """In every row of the card up to 1,024 tokens before; and from few to many, measured again."""
    table = np.array(FIGURES["nats_by_position"])
    assert len(table) * FIGURES["position_bucket"] == evaluation.POSITIONS == 1024
    assert (np.diff(table) < 0).all()
    assert table[-1] < table[0] - 0.2
    wide = np.array(FIGURES["nats_by_wide_position"])
    assert len(wide) * FIGURES["wide_bucket"] == FIGURES["context"]
    assert (wide[1:] < wide[0] - 0.1).all() and np.ptp(wide[1:]) < 0.01
    found = evaluation.position_losses(embedded, held_out, 1024, bucket=256)
    assert (found[1:] < found[0] - 0.05).all()
    assert np.ptp(found[1:]) < 0.05


def test_trigram_probabilities_sum_to_one():
    rng = np.random.default_rng(0)
    learnt = [np.concatenate([[0], rng.integers(1, 7, 200)])]
    for first, second in ((1, 2), (3, 3), (0, 0)):
        tests = [np.array([0, first, second, token]) for token in range(7)]
        total = sum(np.exp(-evaluation.trigram_losses(learnt, [t], 7)[2]) for t in tests)
        assert total == pytest.approx(1.0)


def test_renaming_is_the_same_throughout_a_document():
    texts = {
        "a": "class Mailbox: a mailbox of MAILBOX messages in the mailboxes folder",
        "b": "a folder of messages, and the parser's parser in the Parser",
        "c": "another folder",
    }
    renamer = data.Renamer(texts.values(), share=1.0, spread=1)
    assert renamer.pool == ["mailbox", "parser"]
    found = renamer.rename(texts["b"], np.random.default_rng(1))
    name = found.split("'s")[0].split()[-1]
    assert name in renamer.pool
    assert found == f"a folder of messages, and the {name}'s {name} in the {name.title()}"
    made = {renamer.rename(texts["a"], np.random.default_rng(seed)) for seed in range(20)}
    assert "class Parser: a parser of PARSER messages in the mailboxes folder" in made
    untouched = data.Renamer(texts.values(), share=0.0, spread=1)
    assert untouched.rename(texts["a"], np.random.default_rng(0)) == texts["a"]


def test_repeated_stretches_come_after_their_first_place():
    windows = np.arange(40 * 101).reshape(40, 101)
    rng = np.random.default_rng(3)
    made = data.repeat_stretches(windows, 0.5, rng, least=5, most=20)
    changed = [i for i in range(40) if (made[i] != windows[i]).any()]
    assert 10 <= len(changed) <= 30
    for i in changed:
        at = np.flatnonzero(made[i] != windows[i])
        assert 5 <= len(at) <= 20
        assert (np.diff(at) == 1).all()
        distances = at - np.searchsorted(windows[i], made[i, at])
        assert np.ptp(distances) == 0
        assert distances[0] >= len(at)


@pytest.mark.rare
def test_training_resumes_to_the_same_state(tmp_path):
    small = recipe.Recipe(
        vocab_size=300, hidden_size=64, intermediate_size=64, layers=1, heads=2, kv_heads=1,
        context=16, rows=2, steps=2, warmup=1,
    )  # fmt: skip
    text = {"a": "Return the next item. " * 40}
    tokenizer = data.train_tokenizer(text.values(), small.vocab_size)
    windows = data.Data({"train": text, "validation": text}, tokenizer, small)

    def run(folder: Path, until: int) -> dict:
        trainer = train.Trainer(small, folder)
        list(trainer.run(windows, until))
        trainer.close()
        return jax.device_get(trainer.state)

    whole = run(tmp_path / "whole", 2)
    first = run(tmp_path / "halves", 1)
    resumed = run(tmp_path / "halves", 2)
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), first["params"], whole["params"])
    assert all(jax.tree.leaves(changed))
    with pytest.raises(ValueError, match="another heads"):
        train.Trainer(recipe.Recipe(**{**vars(small), "heads": 1}), tmp_path / "halves")


@pytest.mark.slow
def test_greedy_text_is_made_of_words(embedded, parts):
    known = set(re.findall(r"[a-z]+", " ".join(parts["train"].values()).lower()))
    result = kvjax.generate(embedded, [evaluation.PROMPTS[0]], max_new_tokens=48)
    words = re.findall(r"[a-z]+", result.text[0].lower())
    assert len(words) >= 10
    assert sum(word in known for word in words) >= 0.9 * len(words)


@pytest.mark.oracle
def test_loads_in_transformers(embedded):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    text = "Return True if the file exists.\n\n   See also os.path."
    ids = tokenizer(text)["input_ids"]
    assert ids == embedded.tokenizer.encode(text)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits.numpy()
    tokens, _ = embedded.encode([ids])
    found = np.asarray(embedded.apply(embedded.params, tokens))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
