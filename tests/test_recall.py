"""Key-value retrieval: the task, the model that was trained for it, and what caches forget."""

import math

import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.models.recall import FOLDER
from kvjax.models.recall.measure import KEYS, VOCABULARY, lesson, quiz, recall, rows
from kvjax.models.recall.train import RECIPE, STAGES, Lessons, recall_loss

FACTS = 128


@pytest.fixture(scope="module")
def found():
    return recall(
        {
            "raw": kvjax.policy("static"),
            "bits=8": kvjax.policy(bits=8),
            "bits=4": kvjax.policy(bits=4),
            "bits=1": kvjax.policy(bits=1),
            "window": kvjax.policy("sliding_window", window=256, sinks=4),
        },
        facts=FACTS,
        texts=2,
    )


@pytest.mark.slow
def test_the_model_knows_what_it_was_told(found):
    raw = found["raw"]
    assert raw.share > 0.99 and raw.questions == 2 * FACTS
    assert list(raw.by_distance) == [256, 512]


@pytest.mark.slow
def test_forgotten_tokens_show(found):
    """A window forgets the facts beyond it, and only those."""
    window = found["window"]
    assert window.by_distance[256] > 0.9
    assert window.by_distance[512] < 0.1
    assert window.bytes.body == found["raw"].bytes.body


def test_growing_caches_recall_too():
    shares = recall({"dynamic": kvjax.policy("dynamic")}, facts=8, texts=2, chunk=8)
    assert shares["dynamic"].share == 1


@pytest.mark.slow
def test_bits_matter_less_than_tokens(found):
    assert found["bits=8"].share >= found["raw"].share - 0.002
    assert found["bits=4"].share > 0.98
    assert found["bits=1"].share < found["bits=4"].share


def test_a_quiz_asks_for_what_was_said():
    tokens = quiz(np.random.default_rng(0), 3, 20, 7)
    assert tokens.shape == (3, 54) and tokens.min() > 0 and tokens.max() < VOCABULARY
    for row in tokens:
        pairs = [tuple(pair) for pair in row.reshape(-1, 2).tolist()]
        assert len({key for key, _ in pairs[:20]}) == 20
        assert len(set(pairs[20:])) == 7 and set(pairs[20:]) <= set(pairs[:20])


def test_lessons_are_the_same_whenever_they_are_asked_for():
    first, second = (Lessons(RECIPE).batch(5) for _ in range(2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, Lessons(RECIPE).batch(6))
    keys = []
    for begun in STAGES:
        batch = Lessons(RECIPE).batch(math.ceil(begun * RECIPE.steps))
        rows, length = batch.shape
        full = RECIPE.rows * RECIPE.context
        assert full - length < rows * (length - 1) <= full
        keys.append(batch[:, ::2].max())
        assert batch[:, ::2].min() > 0 and batch[:, 1::2].min() > KEYS
    assert all(most <= count for most, (count, _) in zip(keys, STAGES.values(), strict=True))
    assert keys[0] == 8 and max(keys) == KEYS


@pytest.mark.slow
def test_only_what_can_be_known_counts():
    """The loss is that of the values whose keys stood there before."""
    lm = models.load(FOLDER, dtype="float32")
    windows = lesson(np.random.default_rng(1), 2, 65)
    logits = np.asarray(lm.architecture.apply(lm.params, windows[:, :-1]), np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    chances = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    nats = []
    for row, window in enumerate(windows):
        for pair in range(32):
            if window[2 * pair] in window[: 2 * pair : 2]:
                nats.append(-chances[row, 2 * pair, window[2 * pair + 1]])
    found = float(recall_loss(lm.architecture, lm.params, windows))
    assert found == pytest.approx(np.mean(nats), abs=1e-5) and len(nats) > 10


def test_the_table_has_a_row_a_policy(found):
    table = rows(found)
    assert table[0] == ["policy", "of bfloat16", "right", "1-256 back", "257-512 back"]
    assert [row[0] for row in table[1:]] == list(found)
    assert all(len(row) == len(table[0]) for row in table)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"facts": 0}, "facts must be an integer >= 1, got 0"),
        ({"facts": 257}, "257 questions about 257 facts: expected at most 256 facts"),
        ({"texts": 0}, "texts must be an integer >= 1, got 0"),
        ({"chunk": 0}, "chunk must be an integer >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        recall({}, **settings)


def test_a_model_without_the_tasks_tokens_is_refused(tiny_llama):
    with pytest.raises(ValueError, match="needs a vocabulary of 321 tokens, the model's has 258"):
        recall({}, lm=tiny_llama)


def test_more_questions_than_facts_are_refused():
    with pytest.raises(ValueError, match=f"5 questions about 4 facts: expected at most {KEYS}"):
        quiz(np.random.default_rng(0), 1, 4, 5)
