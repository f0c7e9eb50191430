"""Beam search finds Transformers' texts, with their scores."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.layouts import Paged, Ring
from tests.oracle.test_logits import SMALL

LENGTHS = (7, 12, 3)
NEW = 14
ENDS = [3, 11, 19, 27, 40, 58]
"""Tokens that end a text: so many that most searches have texts of several lengths."""
APART = 2e-4
"""Scores that are closer, relative to their size, may be in another order."""


@pytest.fixture(scope="module")
def pair(make_reference: Callable, transformers: Any) -> Any:
    reference = make_reference("llama", **SMALL)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(reference.folder).eval()
    prompts = [row[:n].tolist() for row, n in zip(reference.tokens, LENGTHS, strict=True)]
    return theirs, models.load(reference.folder, dtype="float32"), prompts


def expected(pair: Any, torch: Any, *, n: int, eos: Any, **settings: Any) -> Any:
    """Texts and scores of each prompt, of a batch that is padded on the left."""
    theirs, _, prompts = pair
    width = max(map(len, prompts))
    tokens = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, ids in enumerate(prompts):
        tokens[row, width - len(ids) :] = torch.tensor(ids)
        mask[row, width - len(ids) :] = 1
    found = theirs.generate(
        tokens, attention_mask=mask, do_sample=False, max_new_tokens=NEW, eos_token_id=eos,
        pad_token_id=0, num_return_sequences=n, output_scores=True, return_dict_in_generate=True,
        **settings,
    )  # fmt: skip
    texts = []
    for row in found.sequences[:, width:].tolist():
        end = next((at for at, token in enumerate(row) if token in (eos or ())), len(row) - 1)
        texts.append(row[: end + 1])
    return texts, found.sequences_scores.numpy().tolist()


def same(found: Any, wanted: Any, n: int) -> None:
    """Scores are Transformers' in any case; texts too, where no other score is as good."""
    texts, scores = wanted
    np.testing.assert_allclose(found.sequence_scores, scores, rtol=1e-4)
    compared = 0
    for first in range(0, len(texts), n):
        each = np.array(scores[first : first + n])
        gaps = np.abs(np.diff(each)) > APART * np.abs(each[1:])
        # The last one given back may be as good as the next, which is not: seen where texts differ.
        for at in range(n):
            clear = (at == 0 or gaps[at - 1]) and (at == n - 1 or gaps[at])
            if clear:
                compared += 1
                assert found.tokens[first + at] == texts[first + at], (first, at)
    assert compared > len(texts) // 2


CASES: dict[str, dict[str, Any]] = {
    "two": {"num_beams": 2, "n": 1, "eos": None},
    "four": {"num_beams": 4, "n": 4, "eos": ENDS},
    "nine": {"num_beams": 9, "n": 3, "eos": ENDS[:2]},
    "early": {"num_beams": 4, "n": 2, "eos": ENDS, "early_stopping": True},
    "never": {"num_beams": 4, "n": 2, "eos": ENDS, "early_stopping": "never"},
    "long": {"num_beams": 4, "n": 4, "eos": ENDS, "length_penalty": 2.5},
    "long and never": {
        "num_beams": 3, "n": 3, "eos": ENDS, "length_penalty": 1.5, "early_stopping": "never"
    },
    "short": {"num_beams": 4, "n": 2, "eos": ENDS, "length_penalty": -1.0},
    "sums": {"num_beams": 4, "n": 2, "eos": ENDS[:1], "length_penalty": 0.0,
             "early_stopping": "never"},
    "penalty": {"num_beams": 4, "n": 2, "eos": ENDS, "repetition_penalty": 1.4},
    "least": {"num_beams": 4, "n": 2, "eos": ENDS, "min_new_tokens": 6},
    "bias": {"num_beams": 4, "n": 2, "eos": ENDS, "bias": {5: 1.5, 9: -3.0, 40: -1.0}},
}  # fmt: skip
NAMES = {"eos": "eos_token_ids", "bias": "logit_bias"}


def ours(pair: Any, settings: Any, **more: Any) -> Any:
    _, lm, prompts = pair
    given = {NAMES.get(name, name): value for name, value in settings.items()}
    given["eos_token_ids"] = given["eos_token_ids"] or ()
    return kvjax.generate(lm, prompts, max_new_tokens=NEW, prefill_chunk=16, **given, **more)


def theirs(pair: Any, torch: Any, settings: Any) -> Any:
    settings = dict(settings)
    if bias := settings.pop("bias", None):
        settings["sequence_bias"] = {(token,): by for token, by in bias.items()}
    return expected(pair, torch, **settings)


@pytest.mark.parametrize("name", CASES)
def test_texts_and_scores(name: str, pair: Any, torch: Any) -> None:
    settings = CASES[name]
    same(ours(pair, settings), theirs(pair, torch, settings), settings["n"])


@pytest.mark.parametrize("early", [False, "never"])
def test_a_guide_allows_what_a_function_of_theirs_does(early: Any, pair: Any, torch: Any) -> None:
    """Beams go by their whole texts; padding counts for nothing."""
    settings = CASES["four"] | {"early_stopping": early}
    vocab, prompts = pair[1].config.vocab_size, pair[2]

    def form(total: int) -> list[int]:
        return [token for token in range(vocab) if (token + total) % 5 < 2]

    wanted = expected(
        pair, torch, **settings,
        prefix_allowed_tokens_fn=lambda _, ids: form(int(ids.sum())),
    )  # fmt: skip
    found = ours(pair, settings, guide=[Sums(form, vocab, sum(ids)) for ids in prompts])
    same(found, wanted, settings["n"])
    assert found.tokens != ours(pair, settings).tokens


class Sums:
    """A guide that goes by the sum of a text's tokens."""

    def __init__(self, form: Callable[[int], list[int]], vocab: int, total: int) -> None:
        self.form, self.vocab, self.total = form, vocab, total

    def allowed(self) -> np.ndarray:
        bits = np.zeros(-(-self.vocab // 32) * 32, np.uint8)
        bits[self.form(self.total)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        self.total += token

    def copy(self) -> "Sums":
        return Sums(self.form, self.vocab, self.total)


LAYOUTS = {
    "dynamic": "dynamic",
    "paged": kvjax.CachePolicy(Paged(16)),
    "ring": kvjax.CachePolicy(Ring(40, sinks=2, slack=15)),
    "paged ring": kvjax.CachePolicy(Paged(16, Ring(40, sinks=2, slack=15))),
    "tail": kvjax.policy(bits=8, block=32),
    "host": kvjax.CachePolicy(placement=kvjax.Host(), block=8),
    "pages on the host": kvjax.CachePolicy(Paged(16), placement=kvjax.Host(), block=8),
    "none": None,
}
"""Of which every one shows all of a text as it was: the window is longer, and codes stand behind a
tail that holds all of it."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_finds_them(layout: str, pair: Any, torch: Any) -> None:
    policy, settings = LAYOUTS[layout], CASES["four"]
    more = {"use_cache": False} if policy is None else {"cache": policy}
    found = ours(pair, settings, logprobs=1, **more)
    same(found, theirs(pair, torch, settings), settings["n"])
    if policy is not None and found.cache is not None:
        kvjax.check(found.cache)


def test_an_encoder_reads_once_for_all_beams(torch: Any, transformers: Any, tmp_path: Any) -> None:
    from tests.oracle.conftest import randomise
    from tests.oracle.test_t5 import T5, asked

    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
    randomise(model, torch).save_pretrained(tmp_path)
    texts = [[5, 9, 30, 4], [8], [40, 7, 7, 12, 3, 1]]
    settings = {"num_beams": 4, "length_penalty": 0.7}
    wanted = model.eval().generate(
        **asked(torch, texts), do_sample=False, max_new_tokens=NEW, eos_token_id=ENDS,
        num_return_sequences=2, output_scores=True, return_dict_in_generate=True, **settings,
    )  # fmt: skip
    rows = []
    for row in wanted.sequences[:, 1:].tolist():
        end = next((at for at, token in enumerate(row) if token in ENDS), len(row) - 1)
        rows.append(row[: end + 1])
    lm = models.load(tmp_path, dtype="float32")
    found = kvjax.generate(lm, texts, max_new_tokens=NEW, eos_token_ids=ENDS, n=2, **settings)
    same(found, (rows, wanted.sequences_scores.numpy().tolist()), 2)
    read = lm.with_encoder_inputs(texts)
    start = [[lm.decoder_start_token_id]] * len(texts)
    again = kvjax.generate(read, start, max_new_tokens=NEW, eos_token_ids=ENDS, n=2, **settings)
    assert again.tokens == found.tokens
