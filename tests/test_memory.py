"""Plans against allocated bytes and operations counted by hand, and limits."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from benchmarks import plans
from kvjax.codecs import Float8
from kvjax.core.pytree import tree_bytes
from kvjax.core.reporting import parse_bytes
from kvjax.memory.limits import (
    DEFAULT_CHOICES,
    InferenceLimits,
    available_memory,
    device_memory,
    largest_that_fits,
    what_fits,
)
from kvjax.memory.planning import plan
from kvjax.memory.shapes import SHAPES, ModelShape
from kvjax.memory.sizes import bytes_per_token, cache_nbytes, memory_report, weight_bytes
from kvjax.models.architecture import Architecture
from tests.alive import alive
from tests.matrix import tiny_config, tiny_model

MODEL, PARAMS = tiny_model()
POLICIES = {
    "static": kvjax.policy("static"),
    "bfloat16": kvjax.policy("static", dtype="bfloat16"),
    "dynamic": kvjax.policy("dynamic"),
    "window": kvjax.policy("sliding_window", window=50, sinks=4),
    "hybrid": kvjax.policy("hybrid"),
    "8 bits": kvjax.policy(bits=8),
    "4 bits": kvjax.policy(bits=4),
    "4 and 2 bits": kvjax.policy("dynamic", key_bits=4, value_bits=2),
    "2 bits, window": kvjax.policy("sliding_window", window=130, bits=2),
    "float8": kvjax.CachePolicy(keys=Float8(), values=Float8(), recent=2),
}
"""Ten configurations whose planned and allocated bytes are compared."""


@pytest.mark.parametrize("name", POLICIES)
def test_planned_bytes_are_allocated(name):
    policy, batch, tokens = POLICIES[name], 3, 700
    cache = kvjax.init_cache(MODEL.config, policy, batch=batch, max_len=tokens)
    if cache.grows_to is not None:
        cache = kvjax.grow(cache, tokens)
    arrays = [x for layer in cache.layers for x in jax.tree.leaves(layer)]
    allocated = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    found = plan(MODEL, policy, batch=batch, max_len=tokens, compiled=False)
    assert set(found.cache) == {"device"}
    assert found.cache == kvjax.nbytes(cache) == cache_nbytes(
        MODEL.config, policy, batch=batch, max_len=tokens
    )  # fmt: skip
    assert found.cache["device"] == pytest.approx(allocated, rel=0.05)
    assert found.weights == tree_bytes(PARAMS) == weight_bytes(MODEL)
    assert found.device == found.weights + found.cache["device"] + found.temporaries


def test_nothing_is_allocated():
    """A model of 65 billion parameters can be planned for in this process."""
    before = len(alive())
    shape = ModelShape(80, 8192, 22016, 64, 64, 128, 32000)
    found = plan(shape, kvjax.policy(bits=4), batch=16, max_len=32768)
    assert found.weights == pytest.approx(2 * 65.3e9, rel=0.01)
    body = 16 * 32768 * 80 * 2 * 8192 * 0.28125 * 2
    assert body < found.cache["device"] < 1.02 * body  # and the tail
    assert len(alive()) == before


@pytest.mark.parametrize("new", [1, 64])
def test_temporaries_are_those_of_the_compiled_program(new):
    policy = kvjax.policy("static")
    cache = kvjax.init_cache(MODEL.config, policy, batch=2, max_len=256)

    def step(params, tokens, cache):
        logits, cache = MODEL.apply(params, tokens, cache, last_only=True)
        return jnp.argmax(logits[:, -1], axis=-1), cache

    tokens = jnp.zeros((2, new), jnp.int32)
    program = jax.jit(step, donate_argnums=2).lower(PARAMS, tokens, cache).compile()
    found = plan(MODEL, policy, batch=2, max_len=256, prefill_chunk=new)
    measured = program.memory_analysis().temp_size_in_bytes
    assert found.temporaries >= measured
    if new > 1:
        assert found.temporaries == measured
    assert found.source == f"compiled for cpu, JAX {jax.__version__}"


@pytest.mark.slow(but=("16",))
@pytest.mark.parametrize("bits", [16, 4])
def test_estimates_are_rather_too_high(bits):
    at = {"policy": kvjax.policy(bits=bits), "batch": 4, "max_len": 1024, "prefill_chunk": 128}
    compiled, estimated = (plan(MODEL, **at, compiled=yes) for yes in (True, False))
    assert estimated.source == "estimated" != compiled.source
    assert compiled.temporaries <= estimated.temporaries <= 10 * compiled.temporaries


def test_operations_and_bytes_counted_by_hand():
    """Two layers after 100 tokens; one has a window of 9."""
    config = MODEL.config
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    kv = config.num_key_value_heads * head_dim
    layer = hidden * (heads * head_dim + 2 * kv) + heads * head_dim * hidden
    layer += 3 * hidden * config.intermediate_size
    matrices = 2 * layer + config.vocab_size * hidden
    assert config.windows == (None, 9)
    found = plan(MODEL, batch=2, max_len=100, compiled=False)
    seen = 100 + 9
    assert found.flops == 2 * (2 * matrices + 4 * heads * head_dim * seen)
    pairs = sum(range(1, 101)) + sum(min(n, 9) for n in range(1, 101))
    assert found.flops_uncached == 2 * (2 * matrices * 100 + 4 * heads * head_dim * pairs)
    assert found.bytes_read == found.weights + 2 * seen * 2 * kv * 4
    assert found.bytes_read_uncached == found.weights
    assert plan(MODEL, max_len=100, length=9, compiled=False).bytes_read == (
        found.weights + 2 * 9 * 2 * kv * 4
    )


def test_of_an_embedding_that_is_looked_up_in_rows_are_read():
    found = {}
    for tied in (True, False):
        model = Architecture(tiny_config(tie_word_embeddings=tied))
        found[tied] = plan(model, batch=2, max_len=10, compiled=False)
    config = model.config
    table = config.vocab_size * config.hidden_size * 4
    row = config.hidden_size * 4
    assert found[False].weights == found[True].weights + table
    assert found[False].bytes_read == found[True].bytes_read + 2 * row
    assert found[False].bytes_read_uncached == found[True].bytes_read_uncached + 20 * row


def test_a_llama_that_does_not_say_its_activation_is_gated():
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100,
        "num_attention_heads": 4, "intermediate_size": 256,
    }  # fmt: skip
    assert ModelShape.from_config(config) == ModelShape.from_config(config | {"hidden_act": "silu"})
    assert not ModelShape.from_config(config | {"model_type": "gpt_neox"}).gated


def test_a_shape_of_a_multimodal_config_is_its_text_parts():
    text = {
        "model_type": "gemma9_text", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100,
        "num_attention_heads": 4, "intermediate_size": 256,
    }  # fmt: skip
    whole = {"model_type": "gemma9", "torch_dtype": "float64", "hidden_size": 9}
    found = ModelShape.from_config(whole | {"text_config": text, "vision_config": {"depth": 3}})
    assert found == ModelShape.from_config(text | {"torch_dtype": "float32"})


def test_a_shape_has_the_weights_of_the_model():
    for tied in (True, False):
        config = tiny_config(tie_word_embeddings=tied, windows=(None, None))
        shape = ModelShape.from_config(
            {
                "num_hidden_layers": 2, "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size, "hidden_act": "silu",
                "num_attention_heads": config.num_attention_heads, "head_dim": config.head_dim,
                "num_key_value_heads": config.num_key_value_heads, "torch_dtype": "float32",
                "vocab_size": config.vocab_size, "tie_word_embeddings": tied,
            }
        )  # fmt: skip
        model = Architecture(config)
        matrices = [x for x in jax.tree.leaves(model.abstract_params()) if len(x.shape) > 1]
        assert weight_bytes(shape) == 4 * sum(math.prod(x.shape) for x in matrices)
        planned = (plan(m, max_len=64, compiled=False) for m in (shape, model))
        first, second = planned
        assert (first.flops, first.cache) == (second.flops, second.cache)
    with pytest.raises(ValueError, match="the config has no num_hidden_layers or n_layer"):
        ModelShape.from_config({"hidden_size": 8, "num_attention_heads": 2})


def test_what_fits_is_the_largest_that_does(full):
    weights = weight_bytes(MODEL)
    rooms = what_fits(MODEL, batch=2, max_len=4096, memory=weights + 40_000_000, fraction=0.7)
    assert [room.name for room in rooms] == ["static", "8 bits", "4 bits", "2 bits", "on the host"]
    for room, choice in zip(rooms, DEFAULT_CHOICES.values(), strict=True):
        policy = kvjax.policy(**choice)
        sizes = cache_nbytes(MODEL.config, policy, batch=2, max_len=4096)
        assert (room.cache, room.host) == (sizes["device"], sizes.get("host", 0))
        assert room.fits == (room.cache <= room.allowed)
        assert room.largest_batch
        if room.host:  # only its tail is on the device
            assert room.largest_len is None and room.fits
            continue
        assert room.largest_len
        if room.name not in ("static", "4 bits") and not full:  # 8 and 2 bits behave like 4
            continue
        for more in (0, 1):  # the largest fits, and one more does not
            at = {"batch": room.largest_batch + more, "max_len": 4096}
            with_more = what_fits(
                MODEL, **at, memory=weights + 40_000_000, fraction=0.7, policies={"": policy}
            )
            assert with_more[0].fits == (not more)
            at = {"batch": 2, "max_len": room.largest_len + more}
            with_more = what_fits(
                MODEL, **at, memory=weights + 40_000_000, fraction=0.7, policies={"": policy}
            )
            assert with_more[0].fits == (not more)
    batches = [room.largest_batch for room in rooms]
    assert batches[:4] == sorted(batches[:4], key=lambda n: n or 0)


def test_nothing_fits_beside_weights_that_do_not():
    rooms = what_fits(MODEL, max_len=64, memory=weight_bytes(MODEL) // 2)
    assert all((r.largest_batch, r.largest_len, r.fits) == (0, 0, False) for r in rooms)


def test_devices_share_evenly():
    whole = what_fits(MODEL, batch=4, max_len=512, memory=10**7)[0]
    half = what_fits(MODEL, batch=4, max_len=512, memory=5 * 10**6, devices=2)[0]
    assert half.cache == whole.cache // 2
    assert half.allowed == pytest.approx(whole.allowed / 2, abs=1)
    with pytest.raises(ValueError, match="3 devices can't share 2 key-value heads evenly"):
        what_fits(MODEL, max_len=64, memory=10**9, devices=3)


def test_devices_that_share_a_text_read_their_tails_whole():
    policy, length = kvjax.policy(bits=4, block=16), 1024
    model, _ = tiny_model(windows=(None, None))
    one, each = (
        plan(model, policy, batch=2, max_len=length, compiled=False, mesh=mesh)
        for mesh in (None, kvjax.make_mesh(sequence=8))
    )
    body = 2 * (length - 2 * 16) * one.bytes_per_token["device"]
    assert one.bytes_read - each.bytes_read == pytest.approx(body * 7 / 8, rel=0.03)


@pytest.mark.parametrize("limit", [None, 1, 7, 100])
@pytest.mark.parametrize("end", [0, 1, 2, 6, 7, 8, 63, 64, 65])
def test_the_largest(limit, end):
    found = largest_that_fits(lambda n: n <= end, limit)
    assert found == (end if limit is None else min(end, limit))


def test_without_end():
    window = kvjax.policy("sliding_window", window=8)
    rooms = what_fits(MODEL, max_len=64, memory=10**8, policies={"window": window})
    assert rooms[0].largest_len is None


def test_sizes_in_words():
    assert parse_bytes("80GiB") == 80 * 2**30 and parse_bytes("40 GB") == 40 * 10**9
    assert parse_bytes("1.5kB") == 1500 and parse_bytes("123B") == 123
    with pytest.raises(ValueError, match="'80' has no unit: give 80GB or 80B"):
        parse_bytes("80")
    for words in ("much", "12 parsecs", "", "-3GB"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_bytes(words)


def test_a_report_says_what_is_where():
    policies = [kvjax.policy("static"), kvjax.policy(bits=4)]
    cache = kvjax.init_cache(MODEL.config, policies, batch=2, max_len=128)
    rows = memory_report(cache)
    assert [row["layer"] for row in rows] == [0, 1]
    assert sum(row["body"] + row["tail"] for row in rows) == kvjax.nbytes(cache)["device"]
    assert rows[0]["tail"] == 0 < rows[1]["tail"] and {row["place"] for row in rows} == {"device"}
    kind = jax.tree.leaves(cache.layers)[0].sharding.memory_kind
    assert {row["memory"] for row in rows} == {kind}


def test_bytes_a_token_of_layers_that_do_not_grow():
    assert bytes_per_token(MODEL.config, kvjax.policy("static")) == {"device": 2 * 2 * 2 * 8 * 4}


def test_rings_take_no_bytes_for_a_token_more():
    config, kv = MODEL.config, 2 * 2 * 8
    wide = kvjax.policy("sliding_window", window=4096)
    assert bytes_per_token(config, wide) == {"device": 0}
    assert bytes_per_token(config, kvjax.policy("sliding_window", window=64, bits=4)) == {
        "device": 0
    }
    assert bytes_per_token(config, kvjax.policy("hybrid")) == {
        "device": kv * 4
    }  # one of two layers
    sizes = [
        cache_nbytes(config, kvjax.policy("hybrid", bits=8), max_len=n)["device"]
        for n in (1024, 2048)
    ]
    each = bytes_per_token(config, kvjax.policy("hybrid", bits=8))["device"]
    assert sizes[1] - sizes[0] == 1024 * each


NEOX = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 10}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_local_experts": 8}, "the config has num_local_experts: the shape alone"),
        ({"kv_lora_rank": 512}, "the config has kv_lora_rank"),
        ({"hidden_size": "a"}, "hidden_size must be an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer >= 1"),
        ({"num_attention_heads": True}, "num_attention_heads must be an integer"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be an integer"),
        ({"num_key_value_heads": [1, 2]}, "num_key_value_heads must be an integer"),
        ({"vocab_size": -4}, "vocab_size must be an integer >= 1"),
        (
            {"dtype": "foo"},
            "the config's dtype must be one of bfloat16, float16, float32, got 'foo'",
        ),
    ],
)
def test_odd_configs_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        ModelShape.from_config(NEOX | changed)


def test_what_a_config_leaves_out_is_the_familys():
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
            "vocab_size": 50257, "activation_function": "gelu_new"}  # fmt: skip
    assert ModelShape.from_config(gpt2) == SHAPES["gpt2"]
    gemma = NEOX | {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"}
    shape = ModelShape.from_config(gemma)
    assert shape.tied and shape.gated and shape.dtype == "bfloat16"
    assert not ModelShape.from_config(NEOX | {"hidden_act": "silu", "model_type": "llama"}).tied


class TestLimits:
    def test_within_them_nothing_changes(self, tiny_llama):
        limits = InferenceLimits(2, 40, 0.5, device_memory=10**9)
        wanted = kvjax.generate(tiny_llama, ["abc", "de"], max_new_tokens=8)
        found = kvjax.generate(tiny_llama, ["abc", "de"], max_new_tokens=8, limits=limits)
        assert found.tokens == wanted.tokens

    @pytest.mark.parametrize(
        ("limits", "message"),
        [
            ({"max_batch_size": 1}, "2 prompts, but max_batch_size is 1"),
            ({"max_seq_len": 10}, "need 32 positions, but max_seq_len is 10"),
            (
                {"cache_memory_ratio": 0.1, "device_memory": 10**6},
                "the cache would take [0-9,]+ bytes of the device, but cache_memory_ratio=0.1 of",
            ),
        ],
    )
    def test_beyond_them_is_an_error_before_anything_is_made(self, tiny_llama, limits, message):
        before = len(alive())
        with pytest.raises(ValueError, match=message):
            kvjax.generate(
                tiny_llama, ["abc", "de"], max_new_tokens=30, limits=InferenceLimits(**limits)
            )
        with pytest.raises(ValueError, match=message):
            kvjax.stream(
                tiny_llama, ["abc", "de"], max_new_tokens=30, limits=InferenceLimits(**limits)
            )
        assert len(alive()) == before

    def test_smaller_caches_go_further(self, tiny_llama):
        config = tiny_llama.config
        sizes = [
            cache_nbytes(config, kvjax.policy(**it), max_len=1024)["device"]
            for it in ({}, {"bits": 4})
        ]
        assert sizes[1] < sizes[0]
        weights = tree_bytes(tiny_llama.params)
        limits = InferenceLimits(
            cache_memory_ratio=1.0, device_memory=weights + 30 * 10**6 + sum(sizes) // 2
        )
        request = {"batch": 1, "need": 900, "capacity": 1024}
        limits.check(tiny_llama, kvjax.policy(bits=4), **request)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"max_batch_size": 0}, "max_batch_size must be an integer >= 1, got 0"),
            (
                {"cache_memory_ratio": 1.5},
                "cache_memory_ratio must be above 0 and at most 1, got 1.5",
            ),
            ({"device_memory": 5}, "device_memory needs cache_memory_ratio"),
        ],
    )
    def test_wrong_limits_are_refused(self, wrong, message):
        with pytest.raises(ValueError, match=message):
            InferenceLimits(**wrong)


def test_a_device_that_does_not_say_is_asked_for_bytes(monkeypatch):
    class Silent:
        device_kind = "cpu"

        def memory_stats(self):
            return None

    class Saying(Silent):
        def memory_stats(self):
            return {"bytes_limit": 12345}

    monkeypatch.setattr("kvjax.memory.limits.default_device", Silent)
    with pytest.raises(ValueError, match="a cpu does not report its memory"):
        device_memory()
    monkeypatch.setattr("kvjax.memory.limits.default_device", Saying)
    assert device_memory() == 12345


def test_wrong_lengths_are_refused():
    with pytest.raises(ValueError, match="length must be at most max_len=8, got 9"):
        plan(MODEL, max_len=8, length=9)
    with pytest.raises(ValueError, match="fraction must be above 0"):
        what_fits(MODEL, max_len=8, memory=10, fraction=0)


def test_the_page_has_the_tables():
    page = plans.PAGE.read_text(encoding="utf-8")
    found = page.split(plans.BEGIN)[1].split(plans.END)[0].splitlines()
    for line in plans.tables({"gpt2": SHAPES["gpt2"]}).splitlines():
        assert line in found
    assert all(sum(line.startswith(f"| {name}") for line in found) == 3 for name in SHAPES)


def test_windows_of_a_config_by_its_family():
    """Missing values have the defaults of Transformers; wrong values raise an error."""
    gemma = {"model_type": "gemma2", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99,
             "num_hidden_layers": 4, "sliding_window": 16}  # fmt: skip
    assert ModelShape.from_config(gemma).windows == (16, None, 16, None)
    assert ModelShape.from_config({**gemma, "model_type": "mistral"}).windows == (16,) * 4
    for wrong in ({"layer_types": 3}, {"sliding_window_pattern": "LLLG"}, {"sliding_window": "a"}):
        with pytest.raises(ValueError, match=r"layers by a list|must be an integer"):
            ModelShape.from_config({**gemma, **wrong})


def test_the_plan_of_a_config_of_another_family(tmp_path):
    shape = {"num_hidden_layers": 44, "hidden_size": 6144, "intermediate_size": 24576,
             "num_attention_heads": 64, "vocab_size": 50432, "hidden_act": "gelu_fast",
             "torch_dtype": "float16", "max_position_embeddings": 2048}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    neox = ModelShape.from_config(shape)
    assert weight_bytes(neox) == pytest.approx(2 * 20.55e9, rel=0.005)
    assert np.isclose(plan(neox, max_len=2048).bytes_per_token["device"], 44 * 2 * 6144 * 2)


def test_layers_fetched_ahead_are_planned_for(tiny_llama):
    """In the plan, in ``what_fits`` and in the limits."""
    plain, ahead = (kvjax.policy("offloaded_static", prefetch=k) for k in (0, 1))
    body = kvjax.memory.cache_nbytes(tiny_llama.config, plain, batch=2, max_len=512)["host"]
    model = tiny_llama.architecture
    few, more = (kvjax.plan(model, each, batch=2, max_len=512) for each in (plain, ahead))
    assert more.device - few.device == body  # both layers of two
    rooms = kvjax.memory.what_fits(
        model, max_len=512, memory=10**8, policies={"plain": plain, "ahead": ahead}
    )
    assert rooms[1].cache - rooms[0].cache == body // 2
    tails = kvjax.memory.cache_nbytes(tiny_llama.config, plain, batch=2, max_len=512)["device"]
    left = available_memory(tiny_llama, batch=2, capacity=512, memory=10**8)
    limits = InferenceLimits(cache_memory_ratio=(tails + 1000) / left, device_memory=10**8)
    request = {"batch": 2, "need": 512, "capacity": 512}
    limits.check(tiny_llama, plain, **request)
    with pytest.raises(ValueError, match="the cache would take"):
        limits.check(tiny_llama, ahead, **request)


def test_what_fits_of_an_automatic_cache():
    """The largest batch has all layers on the host; it is no multiple of a single row."""
    model = Architecture(tiny_config())
    policy = kvjax.policies.Auto(kvjax.policy("dynamic"), 500_000)
    (room,) = kvjax.memory.what_fits(model, max_len=2048, memory=10**9, policies={"auto": policy})
    batch = room.largest_batch
    assert (
        batch
        and room.cache == kvjax.memory.cache_nbytes(model.config, policy, max_len=2048)["device"]
    )
    held = kvjax.memory.cache_nbytes(model.config, policy, batch=batch, max_len=2048)
    assert held["device"] <= 500_000 < (batch + 1) * held["device"] // batch
    with pytest.raises(ValueError, match="the cache may use 500,000 bytes"):
        kvjax.memory.cache_nbytes(model.config, policy, batch=batch + 1, max_len=2048)
