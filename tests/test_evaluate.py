"""Quality metrics: on caches of known quality, and one pass against decoding."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.policies.presets import parse_policy
from kvjax.quality import reports
from kvjax.quality.evaluation import cache_bytes, evaluate, pareto_front
from tests.texts import tokens_of

CONTEXT = 320
AT = {"context": CONTEXT, "chunk": CONTEXT // 2}  # chunks of one width: a program a policy


@pytest.fixture(scope="module")
def tokens(embedded):
    return tokens_of("validation", embedded)[: 2 * CONTEXT + 50]


POLICIES = {
    "raw": kvjax.policy("static"),
    "bits=8": kvjax.policy(bits=8),
    "bits=4": kvjax.policy(bits=4),
    "bits=2": kvjax.policy(bits=2),
    "window": kvjax.policy("sliding_window", window=64, bits=4),
}


@pytest.fixture(scope="module")
def found(embedded, tokens):
    return evaluate(embedded, tokens, POLICIES, **AT)


@pytest.mark.slow
def test_the_full_cache_differs_from_itself_in_nothing(found):
    raw = found["raw"].overall
    assert raw.perplexity_ratio == 1 and raw.top1 == 1
    assert raw.mean_kl == raw.median_kl == raw.high_kl == 0
    assert raw.tokens == 2 * (CONTEXT - 1)
    assert found["raw"].bytes.tail == found["raw"].bytes.scales == 0


@pytest.mark.slow
def test_fewer_bits_are_worse_and_fewer_bytes(found):
    kl = [found[name].overall.mean_kl for name in ("raw", "bits=8", "bits=4", "bits=2")]
    size = [found[name].bytes.body for name in ("raw", "bits=8", "bits=4", "bits=2")]
    assert kl == sorted(kl) and kl[1] < 1e-3 < kl[3]
    assert size == sorted(size, reverse=True)
    assert found["window"].overall.mean_kl > found["bits=4"].overall.mean_kl
    for quality in found.values():
        assert 0 <= quality.overall.median_kl <= quality.overall.high_kl
        assert list(quality.by_position) == [CONTEXT]


@pytest.mark.rare
def test_one_pass_measures_what_decoding_token_by_token_would_see(embedded, tokens):
    policy, text = POLICIES["bits=2"], tokens[:CONTEXT]
    in_chunks = evaluate(embedded, text, {"": policy}, **AT)[""].overall
    cache = kvjax.init_cache(embedded.config, policy, max_len=CONTEXT)
    step = jax.jit(embedded.architecture.apply, donate_argnums=2)
    nats = []
    for token, target in itertools.pairwise(text):
        logits, cache = step(embedded.params, np.array([[token]], np.int32), cache)
        nats.append(-float(jax.nn.log_softmax(logits[0, 0].astype(jnp.float32))[target]))
    assert in_chunks.perplexity == pytest.approx(math.exp(np.mean(nats)), rel=1e-4)


@pytest.mark.rare
def test_ranges_end_at_doubled_positions(embedded):
    text = tokens_of("validation", embedded)[:1280]
    quality = evaluate(embedded, text, {"": kvjax.policy(bits=8)}, context=1280, chunk=256)[""]
    assert list(quality.by_position) == [512, 1024, 1280]
    assert sum(f.tokens for f in quality.by_position.values()) == quality.overall.tokens == 1279


def test_bytes_are_those_of_the_arrays(embedded):
    for policy, of_bfloat16 in (
        (kvjax.policy(bits=8), 0.515625), (kvjax.policy(bits=4), 0.28125),
        (kvjax.policy(key_bits=4, value_bits=2), 0.21875), (kvjax.policy(bits=2), 0.15625),
    ):  # fmt: skip
        cache = kvjax.init_cache(embedded.config, policy, batch=3, max_len=1024)
        held = cache_bytes(cache, 1000)
        assert held.of_bfloat16 == of_bfloat16
        # All but the newest block, the one before it, and the first 4 tokens.
        assert (held.tokens, held.encoded) == (1000, 14 * 64 - 4)
        assert held.row == held.tail + 14 * 64 * held.body
        slots = cache.layers[0].policy.stored_layout.slots * 64
        total = 3 * (slots * held.body + held.tail)
        assert total == kvjax.nbytes(cache)["device"]
        codes = sum(x.size for x in jax.tree.leaves(cache.layers) if x.dtype == jnp.uint8)
        assert (held.body - held.scales) * 3 * slots == codes


@pytest.mark.rare
def test_a_text_of_which_nothing_is_encoded_is_refused(embedded, tokens):
    """It would look exact: all that is seen is in the raw tail."""
    exact = kvjax.policy(bits=1, prefill="exact")
    for policy, context in ((kvjax.policy(bits=1), 129), (exact, 200)):
        with pytest.raises(ValueError, match=rf"lossy: in {context} tokens no prediction sees"):
            evaluate(embedded, tokens, {"raw": "static", "lossy": policy}, context=context)
    one = evaluate(embedded, tokens, {"": kvjax.policy(bits=1)}, context=130, windows=1)[""]
    assert one.bytes.encoded == 60 and one.overall.mean_kl > 0


@pytest.mark.slow
def test_what_a_narrow_window_never_shows_does_not_count_as_encoded(found):
    assert found["window"].bytes.encoded == 0 < found["bits=4"].bytes.encoded


def test_the_front_is_what_no_other_beats(found):
    front = pareto_front(found)
    assert front[0] == "bits=2" and front[-1] == "raw" and "window" not in front


def test_tables_plots_and_json(found, tmp_path, monkeypatch):
    rows = reports.quality_rows(found)
    assert all(len(row) == len(rows[0]) for row in rows)
    table = reports.format_columns(rows).splitlines()
    assert max(map(len, table)) <= 80 and rows[1][0] == "full precision"
    assert rows[1][1:4] == rows[2][1:4] and rows[1][-2:] == ["0", "100.00 %"]
    assert found["window"].bytes.row < found["bits=4"].bytes.row
    assert len(reports.range_rows(found)) == len(found) + 1
    assert json.loads(json.dumps(reports.as_dicts(found)))["bits=8"]["bytes"]["of_bfloat16"]
    kept = []
    monkeypatch.setattr(reports.pyplot(), "close", kept.append)
    reports.plot_quality(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    (axes,) = kept[0].axes
    boxes = [label.get_window_extent() for label in axes.texts]
    assert len(boxes) == len(found)
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:number])
        for line in axes.lines[: len(found)]:
            assert not box.contains(*axes.transData.transform(line.get_xydata()[0]))


@pytest.mark.rare
def test_decode_steps_are_timed_at_the_end_of_a_window(embedded, tokens):
    quality = evaluate(embedded, tokens, {"": kvjax.policy(bits=4)}, **AT, windows=1, time_steps=3)[
        ""
    ]
    assert quality.step_ms is not None and quality.step_ms > 0


def test_policies_in_words():
    assert parse_policy("bits=4") == kvjax.policy(bits=4)
    assert parse_policy("sliding_window, window=64,key_bits=8") == kvjax.policy(
        "sliding_window", window=64, key_bits=8
    )
    with pytest.raises(ValueError, match="the policy 'width=4' has 'width': settings are "):
        parse_policy("width=4")
    assert parse_policy("bits=4", bits=4, group_size=None) == kvjax.policy(bits=4)
    with pytest.raises(ValueError, match="bits is 4 in 'bits=4', but 8 was also given"):
        parse_policy("bits=4", bits=8)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ([5], {}, "the text needs at least 2 tokens, got 1"),
        ([5, 99999], {}, "token id 99999 is out of range: the vocabulary has 4096"),
        ([5] * 9, {"context": 1}, "context must be an integer >= 2, got 1"),
        ([5] * 9, {"chunk": 0}, "chunk must be an integer >= 1, got 0"),
        ([5] * 9, {"windows": 0}, "windows must be an integer >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(embedded, text, settings, message):
    with pytest.raises(ValueError, match=message):
        evaluate(embedded, text, {}, **settings)


@pytest.mark.rare
def test_a_growing_cache_grows_along_the_text(embedded, tokens):
    policies = {
        "static": kvjax.policy(bits=4),
        "dynamic": kvjax.policy("dynamic", bits=4),
        "raw": kvjax.policy("dynamic"),
    }
    found = evaluate(embedded, tokens, policies, **AT, windows=1)
    assert found["dynamic"].overall.mean_kl == pytest.approx(found["static"].overall.mean_kl, 0.02)
    assert found["raw"].overall.mean_kl < 1e-9
