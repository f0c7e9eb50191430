"""Quality of quantized caches where it is easily lost: keys with large biases, single layers."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.codecs import Centered, Int4, Unrotated
from kvjax.models.hub import EMBEDDED
from kvjax.quality.evaluation import evaluate
from tests.checkpoints import write_biased_keys
from tests.texts import tokens_of

CONTEXT = 1024
TIMES = 20


@pytest.fixture(scope="module")
def tokens(embedded):
    return tokens_of("held_out", embedded)[:CONTEXT]


@pytest.fixture(scope="module")
def biased(embedded, tokens, tmp_path_factory):
    """The embedded model as a Qwen 2 with key biases 20 times the median key, in the quarter of the
    channels that turn slowest: a bias that all positions share changes no weights, so it is there
    that trained models have them. (On all channels, they drown the keys: two caches of 8 bits then
    agree on 88 % of the tokens.)"""
    cache = kvjax.init_cache(embedded.config, max_len=CONTEXT)
    _, cache = jax.jit(embedded.architecture.apply)(
        embedded.params, np.asarray(tokens, np.int32)[None], cache
    )
    config = embedded.config
    bias = np.zeros((config.num_hidden_layers, config.num_key_value_heads, config.head_dim))
    rng, half = np.random.default_rng(0), config.head_dim // 2
    for layer in range(config.num_hidden_layers):
        keys = np.abs(np.asarray(kvjax.read(cache, layer)[0], np.float32))
        slow = np.r_[half - 8 : half, 2 * half - 8 : 2 * half]
        signs = rng.choice([-1.0, 1.0], (config.num_key_value_heads, len(slow)))
        bias[layer][:, slow] = TIMES * np.median(keys) * signs
    folder = tmp_path_factory.mktemp("biased")
    write_biased_keys(folder, EMBEDDED, bias.reshape(len(bias), -1))
    return models.load(folder, dtype="float32")


@pytest.mark.rare
def test_large_key_biases_do_not_collapse(biased, tokens):
    naive = kvjax.CachePolicy(keys=Int4("token"), values=Int4("token"))
    centered = kvjax.CachePolicy(
        keys=Unrotated(Centered(Int4("token"))),
        values=Int4("token"),
    )
    found = evaluate(
        biased, tokens, {"4": kvjax.policy(bits=4), "naive": naive, "centered": centered}
    )
    top1 = {name: quality.overall.top1 for name, quality in found.items()}
    assert top1["4"] >= 0.95 and top1["centered"] >= 0.95
    assert top1["naive"] < 0.85
    assert found["naive"].overall.mean_kl > 30 * found["4"].overall.mean_kl
    assert (
        found["naive"].overall.perplexity_ratio > 1.08 > 1.01 > found["4"].overall.perplexity_ratio
    )


@pytest.mark.rare
def test_edges_at_more_bits_are_better_than_without(embedded, tokens):
    low, high = kvjax.policy(bits=1), kvjax.policy(bits=8)
    found = evaluate(
        embedded, tokens, {"low": low, "edges": kvjax.policies.Edges(low, high), "high": high}
    )
    kl = [found[name].overall.mean_kl for name in ("high", "edges", "low")]
    size = [found[name].bytes.body for name in ("high", "edges", "low")]
    assert kl == sorted(kl) and size == sorted(size, reverse=True)
    # Two of the four layers at either policy.
    assert size[1] == (size[0] + size[2]) / 2
