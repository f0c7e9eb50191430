"""Every decoder's configuration that Transformers can make, against the layers that its caches make
and what its models put there."""

import collections

import pytest

pytest.importorskip("torch", reason="needs torch (the extra `oracle`)")
pytest.importorskip("transformers", reason="needs transformers (the extra `oracle`)")

import jax
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import kvjax
from kvjax.codecs import Raw

MAX_LEN = 16
UNMADE = {"blt", "deepseek_v4", "gemma4_assistant", "gemma4_unified_assistant"}
"""Of these Transformers makes no configuration, or no cache, from what stands in their classes."""
HEADLESS = {"rwkv", "xlstm"}
"""These have no attention, though Transformers makes layers for them that stay empty."""
LATENT = {"deepseek_v2", "longcat_flash"}
"""The models of these do not run without numbers; their keys have other channels than values."""
NAMES, PARTS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), 4


def configuration(name):
    config = CONFIG_MAPPING[name]()
    config.is_decoder = True
    return config


def layers_of(cache):
    """What each layer is: "all", a window, "dummy" where it reads another's, or something else."""
    for layer in cache.layers:
        kind = type(layer).__name__.removeprefix("Dynamic").removeprefix("Static")
        if kind == "Layer":
            yield "all"
        elif kind == "SlidingWindowLayer":
            yield "window"
        else:
            yield "dummy" if kind == "DummyLayer" else "other"


def stored_by_the_model(config):
    """Shapes of keys and values that a step of the model puts there, None where the model does not
    run without numbers. Nothing is computed, and nothing allocated."""
    cache = DynamicCache(config=config)
    try:
        with torch.no_grad(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
            model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    except Exception:  # whatever a model does with numbers that there are none of
        return None
    return [
        None if getattr(layer, "keys", None) is None
        else (tuple(layer.keys.shape), tuple(layer.values.shape))
        for layer in cache.layers
    ]  # fmt: skip


def ours(config):
    policies = kvjax.CachePolicy(keys=Raw("bfloat16"), values=Raw("bfloat16"))
    make = lambda: kvjax.init_cache(config, policies, max_len=MAX_LEN)  # noqa: E731
    return jax.eval_shape(make)


def compare(name, outcomes):
    try:
        config = configuration(name)
        wanted = DynamicCache(config=config)
        static = StaticCache(config=config, max_cache_len=MAX_LEN)
    except Exception:  # Transformers' own
        outcomes["no cache of Transformers"].append(name)
        return
    kinds = list(layers_of(wanted))
    assert list(layers_of(static)) == kinds
    stored = stored_by_the_model(configuration(name))
    if "other" in kinds:
        with pytest.raises(ValueError, match="a cache holds layers of full_attention"):
            ours(config)
        outcomes["other layers"].append(name)
        return
    if stored is not None and any(each is not None and each[0] != each[1] for each in stored):
        with pytest.raises(ValueError, match="keys and values have different head dimensions"):
            ours(config)
        outcomes["keys unlike values"].append(name)
        return
    if name in HEADLESS:
        with pytest.raises(ValueError, match="neither num_key_value_heads nor num_attention_heads"):
            ours(config)
        return
    try:
        found = ours(config)
    except ValueError as error:
        assert "different head dimensions" in str(error) and stored is None, (name, str(error))
        assert name in LATENT
        return
    sources = found.sources or tuple(range(len(found.layers)))
    assert len(sources) == len(kinds), name
    first = {source: layer for layer, source in reversed([*enumerate(sources)])}
    for number, (kind, layer, source) in enumerate(zip(kinds, wanted.layers, sources, strict=True)):
        held = found.layers[source]
        assert (first[source] != number) == (kind == "dummy"), (name, number)
        if kind != "dummy":
            assert held.window == (layer.sliding_window if kind == "window" else None), name
        if stored is not None and stored[number] is not None:
            keys = stored[number][0]
            assert (held.kv_heads, held.head_dim) == (keys[1], keys[3]), (name, number, keys)
    compared = stored is not None and any(each is not None for each in stored)
    outcomes["layers and heads" if compared else "layers"].append(name)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_decoder_has_the_layers_of_transformers(part):
    """Those that keep something else than keys and values are refused in a sentence."""
    logging.set_verbosity_error()
    outcomes = collections.defaultdict(list)
    for name in NAMES[part::PARTS]:
        compare(name, outcomes)
    # By hand: 114 of 189 with heads, 29 without, as the models do not run without numbers.
    assert len(outcomes["layers and heads"]) >= 25, outcomes
    assert len(outcomes["layers"]) <= 12, outcomes
    assert set(outcomes["no cache of Transformers"]) <= UNMADE, outcomes
