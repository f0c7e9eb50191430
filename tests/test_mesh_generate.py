"""Generation on a mesh."""

import functools
import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.jax_utils import replicate
from jax.sharding import AxisType

import kvjax
from kvjax import models
from kvjax.memory import InferenceLimits
from kvjax.memory.limits import auto_mesh, device_memory
from kvjax.memory.sizes import weight_bytes
from kvjax.models.architecture import Architecture
from kvjax.models.config import (
    Cohere2Config,
    GemmaConfig,
    GPT2Config,
    NeoXConfig,
    Phi3Config,
    RopeConfig,
)
from kvjax.models.config_gemma import Gemma3nConfig, Gemma4Config
from kvjax.models.config_moe import Llama4Config, MoeConfig
from tests.checkpoints import write_llama
from tests.matrix import FULL, cells, tiny_config
from tests.meshes import SHAPES, close, mesh, model_of


@pytest.fixture(scope="module")
def tiny_llama_dir(tmp_path_factory):
    """Of one layer, in place of the other tests' of two: every layer compiles anew."""
    return write_llama(tmp_path_factory.mktemp("checkpoints") / "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def tiny_llama(tiny_llama_dir):
    return models.load(tiny_llama_dir, dtype="float32")


PROMPTS = ["Once upon a time", "Hi", "abcdefgh" * 5]
# Prompts of any length in chunks of one width: the tests share programs.
SHARED: dict[str, Any] = {"prefill_chunk": 16, "eos_token_ids": ()}


class On(NamedTuple):
    """Something on something; of a run, each of either is in one such."""

    what: str
    where: str

    @property
    def id(self) -> str:
        return "-".join(self)


def each_on_each(what: Any, where: Any) -> list[Any]:
    """All of them by themselves; the other pairs are of the shards."""
    every = [On(*names) for names in itertools.product(what, where)]
    return cells(every, [("what", "what"), ("where", "where")])


@pytest.mark.slow(but=("dynamic-1-8-1",))
@pytest.mark.parametrize(
    "cell", each_on_each(["static", "dynamic", "quantized", "offloaded"], SHAPES)
)
def test_generated_tokens_are_those_of_one_device(tiny_llama, cell):
    cache, shape = cell
    settings = dict(max_new_tokens=40, **SHARED)
    wanted = kvjax.generate(tiny_llama, PROMPTS, cache=cache, **settings)
    lm = tiny_llama.on(mesh(shape))
    found = kvjax.generate(lm, PROMPTS, cache=cache, **settings)
    assert found.tokens == wanted.tokens
    assert found.text == wanted.text
    assert found.stats.new_tokens == wanted.stats.new_tokens == 120
    assert found.stats.prompt_tokens == wanted.stats.prompt_tokens
    assert found.stats.finish_reasons == wanted.stats.finish_reasons
    assert (
        found.cache.batch
        == -(-3 // found.cache.mesh_sharding.rows) * found.cache.mesh_sharding.rows
    )
    # Continue the cache of the earlier call, with the same settings.
    more = [
        kvjax.generate(model, made.pending_tokens, cache=made.cache, max_new_tokens=3, **SHARED)
        for model, made in ((tiny_llama, wanted), (lm, found))
    ]
    assert more[0].tokens == more[1].tokens


@pytest.mark.slow
def test_nothing_compiles_twice_on_a_mesh(tiny_llama):
    lm = tiny_llama.on(mesh("2-2-2"))
    kvjax.generate(lm, PROMPTS, max_new_tokens=20, **SHARED)
    again = kvjax.generate(lm, PROMPTS[::-1], max_new_tokens=11, **SHARED)
    assert again.stats.compilations == 0


def _set(shape, kind, names=("data", "tensor", "sequence")):
    """``jax.set_mesh`` of a mesh with axes of a kind."""
    return jax.set_mesh(jax.make_mesh(shape, names, axis_types=(kind,) * len(shape)))


@pytest.mark.rare
def test_generation_inside_a_mesh_that_is_set(tiny_llama):
    settings = dict(max_new_tokens=8, **SHARED)
    wanted = kvjax.generate(tiny_llama, PROMPTS, **settings).tokens
    lm = tiny_llama.on(mesh("2-2-2"))
    outer = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    for kind, names in ((AxisType.Auto, None), (AxisType.Explicit, None), (None, "x")):
        context = jax.set_mesh(outer) if names else _set((2, 2, 2), kind)
        with context:
            set_mesh = jax.sharding.get_abstract_mesh()
            assert kvjax.generate(lm, PROMPTS, **settings).tokens == wanted
            assert kvjax.generate(tiny_llama, PROMPTS, **settings).tokens == wanted
            running = kvjax.stream(lm, PROMPTS, **settings)
            for _ in running:
                assert jax.sharding.get_abstract_mesh() == set_mesh
            assert running.result.tokens == wanted
            found = kvjax.generate_batches(tiny_llama, [PROMPTS], mesh=lm.mesh, **settings)
            assert [result.tokens for result in found] == [wanted]


STEPPED = {"static": ("static", 1e-5), "8 bits": (kvjax.policy("static", bits=8), 1e-3)}
"""Policies, and how close their logits come."""


def stepped(lm: Any, over: Any, policy: Any) -> np.ndarray:
    """The logits after a prompt and four steps of a function of one's own."""

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, cache, token, lengths=None):
        logits, cache = lm.apply(params, token, cache, lengths=lengths, last_only=True)
        return cache, logits

    cache = kvjax.init_cache(lm.config, policy, batch=8, max_len=64, mesh=over)
    tokens, lengths = lm.encode((PROMPTS * 3)[:8])
    cache, logits = step(lm.params, cache, tokens, lengths)
    placed = [leaf.sharding for leaf in jax.tree.leaves(cache)]
    for _ in range(4):
        before = cache
        cache, logits = step(lm.params, cache, jnp.argmax(logits, -1))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert step._cache_size() == 2
    assert [leaf.sharding for leaf in jax.tree.leaves(cache)] == placed
    return np.asarray(logits)


@pytest.fixture(scope="module")
def stepped_on_one_device(tiny_llama):
    return functools.cache(lambda name: stepped(tiny_llama, None, STEPPED[name][0]))


@pytest.mark.slow
@pytest.mark.parametrize("cell", each_on_each(STEPPED, SHAPES))
def test_a_step_of_ones_own_inside_the_mesh_that_is_set(tiny_llama, stepped_on_one_device, cell):
    name, shape = cell
    policy, tolerance = STEPPED[name]
    over, lm = mesh(shape), tiny_llama.on(mesh(shape))
    wanted = stepped_on_one_device(name)
    with jax.set_mesh(over):
        found = stepped(lm, over, policy)
    close([found], [wanted], tolerance)


def test_another_mesh_that_is_set_is_refused(tiny_llama):
    lm = tiny_llama.on(mesh("2-2-2"))
    cache = kvjax.init_cache(lm.config, batch=2, max_len=16, mesh=lm.mesh)
    tokens = lm.encode([[1, 2], [3, 4]])[0]
    keys = jnp.zeros((2, lm.config.num_key_value_heads, 2, lm.config.head_dim))
    others = [
        ((2, 2, 2), AxisType.Explicit, ("data", "tensor", "sequence")),
        ((8,), AxisType.Auto, ("x",)),
        ((1, 4, 2), AxisType.Auto, ("data", "tensor", "sequence")),
    ]
    for shape, kind, names in others:
        with _set(shape, kind, names):
            for call in (
                lambda: lm.apply(lm.params, tokens, cache),
                lambda: jax.jit(lm.apply)(lm.params, tokens, cache),
                lambda: jax.jit(kvjax.append, static_argnums=1)(cache, 0, keys, keys),
            ):
                with pytest.raises(
                    ValueError, match=r"the mesh that kvjax\.make_mesh returned, or none"
                ):
                    call()
            # Outside of a program of the user's, the mesh that is named is the one that counts.
            made = kvjax.init_cache(lm.config, batch=2, max_len=16, mesh=lm.mesh)
            assert made.length.sharding == cache.length.sharding


def told(result: Any) -> list[Any]:
    """The log-probabilities of each token and of its likeliest alternatives."""
    return [
        [score.logprob, *sum(score.top_logprobs, ())]
        for row in result.logprobs or ()
        for score in row
    ]


@pytest.mark.rare
def test_sampling_stops_and_no_cache_on_a_mesh(tiny_llama):
    over = mesh("2-2-2")
    filters = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}
    ways = (
        {"use_cache": False},
        {"temperature": 1.0, "seed": 3},
        {"logprobs": 2, "logit_bias": {65: 3.0}},
        filters | {"seed": 3, "logprobs": 2},
        filters | {"seed": [5, 6, 7]},
        *({"temperature": 0.9, name: filters[name]} for name in filters if FULL),
    )
    for way in ways:
        settings = dict(max_new_tokens=12, **SHARED, **way)
        wanted = kvjax.generate(tiny_llama, PROMPTS, **settings)
        found = kvjax.generate(tiny_llama, PROMPTS, mesh=over, **settings)
        assert found.tokens == wanted.tokens
        for score, other in zip(told(found), told(wanted), strict=True):
            np.testing.assert_allclose(score, other, atol=1e-5)
    settings["stop"] = wanted.text[0][3:5]
    wanted = kvjax.generate(tiny_llama, PROMPTS, **settings)
    pieces = list(running := kvjax.stream(tiny_llama, PROMPTS, mesh=over, **settings))
    assert running.result.text == wanted.text
    assert ["".join(piece.text[row] for piece in pieces) for row in range(3)] == wanted.text


@pytest.mark.slow
def test_a_cache_elsewhere_is_refused(tiny_llama):
    made = kvjax.generate(tiny_llama, PROMPTS[:2], max_new_tokens=3, **SHARED)
    lm = tiny_llama.on(mesh("2-2-2"))
    with pytest.raises(ValueError, match=r"kvjax.migrate.cache, mesh=lm.mesh. moves it there"):
        kvjax.generate(lm, made.pending_tokens, cache=made.cache)
    cache = kvjax.migrate(kvjax.fork(made.cache), mesh=lm.mesh)
    settings = dict(max_new_tokens=5, **SHARED)
    found = kvjax.generate(lm, made.pending_tokens, cache=cache, **settings)
    wanted = kvjax.generate(tiny_llama, made.pending_tokens, cache=made.cache, **settings)
    assert found.tokens == wanted.tokens


def test_rows_that_fill_a_mesh_up_are_no_prompts(tiny_llama):
    lm = tiny_llama.on(kvjax.make_mesh(data=4))
    one = InferenceLimits(max_batch_size=3)
    settings = dict(max_new_tokens=2, **SHARED)
    made = kvjax.generate(lm, PROMPTS, limits=one, **settings)
    with pytest.raises(ValueError, match="3 prompts, but max_batch_size is 2"):
        kvjax.generate(lm, PROMPTS, limits=InferenceLimits(max_batch_size=2))
    # A text must not be taken for such a row.
    with pytest.raises(ValueError, match="the cache has tokens in 3 rows, but there are 2 prompts"):
        kvjax.generate(lm, made.pending_tokens[:2], cache=made.cache, **settings)
    assert kvjax.generate(lm, made.pending_tokens, cache=made.cache, **settings).cache.batch == 4


@pytest.mark.rare
def test_one_text_is_evaluated_on_tensor_and_sequence(tiny_llama):
    settings = {
        "policies": {
            "8 bits": kvjax.policy(bits=8, block=8), "4 bits": kvjax.policy(bits=4, block=8),
        },
        "text": np.random.default_rng(0).integers(0, 256, 130).tolist(),
        "context": 64,
    }  # fmt: skip
    one, many = (
        kvjax.evaluate(each, **settings)
        for each in (tiny_llama, tiny_llama.on(kvjax.make_mesh(tensor=2, sequence=4)))
    )
    for name, tolerance in (("8 bits", 1e-4), ("4 bits", 1e-3)):
        wanted = one[name].overall.perplexity
        assert many[name].overall.perplexity == pytest.approx(wanted, rel=tolerance)
    with pytest.raises(ValueError, match="a mesh can't divide a single text"):
        kvjax.evaluate(tiny_llama.on(kvjax.make_mesh(data=2)), **settings)


@pytest.mark.slow
def test_batches_on_a_mesh(tiny_llama):
    batches, settings = [PROMPTS, PROMPTS[:1]], dict(max_new_tokens=12, **SHARED)
    wanted = [r.tokens for r in kvjax.generate_batches(tiny_llama, batches, **settings)]
    over = kvjax.generate_batches(tiny_llama, batches, mesh=mesh("2-2-2"), **settings)
    assert [r.tokens for r in over] == wanted


def test_a_model_that_one_device_does_not_hold_is_spread():
    def spread(heads, kv_heads, part):
        """How many devices hold a model whose weights take 1 / part of one's memory, and theirs."""
        width = dict(hidden_size=heads * 8, intermediate_size=heads * 32, head_dim=8)
        config = tiny_config(num_attention_heads=heads, num_key_value_heads=kv_heads, **width)
        model = Architecture(config)
        memory = int(weight_bytes(model) * part / 0.8) + 1
        over = auto_mesh(model, memory=memory)
        assert weight_bytes(model, over) <= 0.8 * memory
        return 1 if over is None else over.shape["tensor"]

    assert spread(8, 8, 1) == 1
    assert spread(8, 8, 0.9) == spread(8, 2, 0.6) == 2
    assert spread(8, 8, 0.3) == 4
    # Seven devices could share 28 heads, but not the weights of 4 key-value heads.
    assert spread(28, 4, 0.4) == 4
    assert auto_mesh(Architecture(tiny_config())) is None  # a CPU does not say what it has
    with pytest.raises(ValueError, match=r"when spread over the 8 local device\(s\), but"):
        spread(8, 8, 0.05)


def test_the_default_device_is_asked_how_much_memory_it_has(monkeypatch, tiny_llama):
    size = weight_bytes(tiny_llama.architecture)
    small = SimpleNamespace(platform="cpu", memory_stats=lambda: {"bytes_limit": size})
    monkeypatch.setattr("kvjax.memory.limits.default_device", lambda: small)
    assert auto_mesh(tiny_llama.architecture).shape["tensor"] == 2
    assert device_memory() == size


def test_loading_spreads_what_one_device_does_not_hold(monkeypatch, tiny_llama, tiny_llama_dir):
    weights = sum(x.nbytes for x in jax.tree.leaves(tiny_llama.params))
    small = functools.partial(auto_mesh, memory=int(weights / 1.5))
    monkeypatch.setattr(importlib.import_module("kvjax.models.loading"), "auto_mesh", small)
    lm = models.load(tiny_llama_dir, dtype="float32")
    assert lm.mesh is not None and lm.mesh.shape["tensor"] == 2
    settings = dict(max_new_tokens=9, **SHARED)
    found = kvjax.generate(lm, PROMPTS, **settings)
    assert found.tokens == kvjax.generate(tiny_llama, PROMPTS, **settings).tokens
    assert models.load(tiny_llama_dir, dtype="float32", mesh=None).mesh is None


@pytest.mark.rare
def test_the_documented_scripts_run(tiny_llama_dir):
    """One after the other, word by word, but for the path of the model."""
    text = (Path(__file__).parents[1] / "docs" / "sharding.md").read_text(encoding="utf-8")
    blocks = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    names: dict[str, Any] = {}
    exec("\n".join(blocks).replace("path/or/hub-id", tiny_llama_dir.as_posix()), names)
    assert all(names["result"].text)
    assert names["logits"].shape == (2 * len(jax.devices()), 1, names["lm"].config.vocab_size)
    tokens = np.ones((len(jax.devices()), 2, 1), np.int32)
    token, _ = names["decode_step"](names["lm"].params, tokens, names["caches"])
    assert token.shape == tokens.shape
    for _ in range(2):
        logits = names["step_in_place"](names["lm"].params, tokens[0], names["refs"])
    assert logits.shape == (2, 1, names["lm"].config.vocab_size)
    assert names["refs"].length[...].tolist() == [2, 2]


def test_a_model_and_a_cache_apart_are_refused(tiny_llama):
    over = mesh("2-2-2")
    lm = tiny_llama.on(over)
    for model, place in ((tiny_llama, over), (lm, None)):
        cache = kvjax.init_cache(lm.config, "static", batch=2, max_len=16, mesh=place)
        with pytest.raises(ValueError, match="with the same mesh"):
            lm.apply(model.params, np.ones((2, 3), np.int32), cache)
    tokens, lengths = lm.encode(["abc", "d", "ef"])  # three rows, on data=2
    assert tokens.sharding.device_set == lengths.sharding.device_set == set(over.devices.flat)


@pytest.mark.rare
def test_gradients_and_odd_ends_on_a_mesh():
    model, params = model_of("grouped")
    over = mesh("2-2-2")
    placed = jax.device_put(params, model.param_shardings(over))
    tokens = np.random.default_rng(0).integers(0, 61, (8, 12)).astype(np.int32)

    def gradients(params, over):
        cache = kvjax.init_cache(model.config, "static", batch=8, max_len=16, mesh=over)

        def loss(params):
            first, filled = model.apply(params, tokens[:, :6], cache)
            second, _ = model.apply(params, tokens[:, 6:], filled)
            return jnp.mean(first**2) + jnp.mean(second**2)

        return jax.tree.leaves(jax.jit(jax.grad(loss))(params))

    close(gradients(placed, over), gradients(params, None))
    cache = kvjax.init_cache(model.config, "static", batch=8, max_len=13, mesh=over)
    for _ in range(2):
        _, cache = jax.jit(model.apply)(placed, tokens, cache)
    with pytest.raises(kvjax.CacheOverflowError, match="the cache holds 13 tokens a row"):
        kvjax.check(cache)


@pytest.mark.rare
def test_bench_on_a_mesh(tiny_llama):
    lm, settings = tiny_llama.on(mesh("2-2-2")), dict(prompts=[16], steps=4, repeats=1)
    settings["bandwidth"] = kvjax.bench.Bandwidth(1e9, 5e8, {}, 4096)
    found = kvjax.bench.measure(lm, {"static": kvjax.policy("static")}, batches=[2], **settings)
    assert len(found.cells) == 1
    with pytest.raises(ValueError, match="1 rows can't be divided among data=2"):
        kvjax.bench.measure(lm, {"static": kvjax.policy("static")}, **settings)


@pytest.mark.slow
def test_pmap_of_a_decode_step(tiny_llama):
    """A batch a device, over replicated parameters, as older scripts have it."""
    devices = jax.devices()[:4]
    prompts = np.arange(4 * 2 * 7, dtype=np.int32).reshape(4, 2, 7) % 250

    def caches():
        made = kvjax.init_cache(tiny_llama.config, "static", batch=2, max_len=32)
        return replicate(made, devices)

    @functools.partial(jax.pmap, in_axes=(None, 0, 0), devices=devices, donate_argnums=2)
    def decode_step(params, token, cache):
        logits, cache = tiny_llama.apply(params, token, cache)
        return jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32), cache

    token, cache = decode_step(tiny_llama.params, prompts, caches())
    found = [token]
    for _ in range(5):
        token, cache = decode_step(tiny_llama.params, token, cache)
        found.append(token)
    found = np.concatenate([np.asarray(x) for x in found], axis=2)
    for part, tokens in zip(prompts, found, strict=True):
        wanted = kvjax.generate(tiny_llama, part.tolist(), max_new_tokens=6, **SHARED)
        assert tokens.tolist() == wanted.tokens


def gemma():
    rope = RopeConfig()
    return GemmaConfig(
        "gemma2", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        rms_norm_eps=1e-5, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True,
        qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=True, query_pre_attn_scalar=8.0,
        attn_logit_softcapping=20.0, final_logit_softcapping=10.0, rope=rope,
        local_rope=RopeConfig(theta=1000.0), windows=(7, None),
    )  # fmt: skip


def gpt2():
    return GPT2Config(
        "gpt2", vocab_size=61, hidden_size=24, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=3, head_dim=8, max_position_embeddings=64,
        layer_norm_epsilon=1e-5, activation="gelu_new", tie_word_embeddings=False,
        scale_attn_weights=True, scale_attn_by_inverse_layer_idx=True,
    )  # fmt: skip


def odd_llama():
    # Heads that no mesh here divides evenly, biases, and a head of its own.
    return tiny_config(
        num_attention_heads=6, num_key_value_heads=3, qkv_bias=True, output_bias=True,
        mlp_bias=True, qk_norm=True, tie_word_embeddings=False, intermediate_size=50,
    )  # fmt: skip


def phi3():
    return Phi3Config(**vars(tiny_config(intermediate_size=50)))


def olmo2():
    return tiny_config(pre_norms=False, post_norms=True, qk_norm=True, qk_norm_joint=True)


def cohere2():
    norms = dict(centered_norms=True, wide_norms=True)
    config = tiny_config(rope_layers=(False, True), rope_interleaved=True, **norms)
    return Cohere2Config(**vars(config), logit_scale=0.25)


def neox():
    biases = dict(qkv_bias=True, output_bias=True, mlp_bias=True)
    return NeoXConfig(**vars(tiny_config(num_key_value_heads=4, windows=(None, None), **biases)))


def experts():
    return MoeConfig(
        **vars(tiny_config()), num_experts=5, num_experts_per_tok=2, norm_topk_prob=True,
        moe_intermediate_size=36, dense_layers=(1,),
    )  # fmt: skip


def llama4():
    return Llama4Config(
        **vars(tiny_config(rope_layers=(False, True), rope_interleaved=True)), num_experts=5,
        num_experts_per_tok=2, norm_topk_prob=False, moe_intermediate_size=36, use_qk_norm=True,
        attn_temperature=(0.1, 6),
    )  # fmt: skip


def gemma3n():
    return Gemma3nConfig(
        **vars(tiny_config(num_hidden_layers=3, windows=(None, 9, 9), wide_norms=True)),
        intermediate_sizes=(48, 50, 48), activation_sparsity_pattern=(0.0, 0.5, 0.0),
        num_kv_shared_layers=1, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=50, altup_num_inputs=2, altup_active_idx=0,
        altup_correct_scale=True, laurel_rank=4,
    )  # fmt: skip


def gemma4():
    return Gemma4Config(
        **vars(tiny_config(num_hidden_layers=3, windows=(None, 9, 9), wide_norms=True)),
        intermediate_sizes=(48, 48, 96), num_kv_shared_layers=1, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=61,
        num_global_key_value_heads=1, global_head_dim=16, attention_k_eq_v=True, num_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=36,
    )  # fmt: skip


FAMILIES = {
    "gemma": gemma, "gpt2": gpt2, "odd-llama": odd_llama, "phi3": phi3, "olmo2": olmo2,
    "neox": neox, "experts": experts, "llama4": llama4, "gemma3n": gemma3n,
    "gemma4": gemma4, "cohere2": cohere2,
}  # fmt: skip
DIVIDED = {
    "tensor-4-sequence-2": {"tensor": 4, "sequence": 2},
    "sequence-3": {"sequence": 3},
    "tensor-2": {"tensor": 2},
}


@functools.cache
def family_of(name: str) -> Any:
    """A model of a family, its parameters, and its logits on one device."""
    model = Architecture(FAMILIES[name]())
    params = jax.tree.map(lambda x: x if x.ndim == 1 else 8 * x, model.init_params(0))
    return model, params, family_logits(model, params, None)


def family_logits(model: Any, params: Any, over: Any) -> Any:
    tokens = np.random.default_rng(0).integers(0, 61, (2, 14)).astype(np.int32)
    cache = kvjax.init_cache(model.config, "hybrid", batch=2, max_len=50, mesh=over)
    call = jax.jit(model.apply)
    found = []
    for part in np.split(tokens, [9, 10, 11, 12, 13], axis=1):
        each, cache = call(params, part, cache)
        found.append(each)
    return [*found, jax.jit(model.apply)(params, tokens)]


def families() -> list[Any]:
    """Each by itself; those that divide as others do are of the shards."""
    first = ("gpt2", "odd-llama", "experts")
    alike = [name for name in FAMILIES if name not in first]
    others = [On(*names) for names in itertools.product(alike, DIVIDED)]
    return [
        *each_on_each(first, DIVIDED),
        *(pytest.param(cell, id=cell.id, marks=pytest.mark.rare) for cell in others),
    ]


@pytest.mark.slow(but=("gpt2-tensor-4-sequence-2",))
@pytest.mark.parametrize("cell", families())
def test_every_family_on_a_mesh(cell):
    family, sizes = cell
    model, params, wanted = family_of(family)
    over = kvjax.make_mesh(**DIVIDED[sizes])
    placed = jax.device_put(params, model.param_shardings(over))
    found = family_logits(model, placed, over)
    close(found, wanted)
    # And the pass without a cache is what both are held against.
    close([np.concatenate(found[:-1], axis=1)], wanted[-1:])


@pytest.mark.rare
def test_memory_on_a_mesh(tmp_path):
    tiny_llama = models.load(write_llama(tmp_path / "of-two-layers"), dtype="float32")
    lm, settings = tiny_llama.on(mesh("2-2-2")), dict(max_new_tokens=80, **SHARED)
    wanted = kvjax.generate(tiny_llama, PROMPTS, **settings)
    tails = kvjax.nbytes(wanted.cache)["device"] // 2
    auto = kvjax.policy("auto", memory=tails)
    found = kvjax.generate(lm, PROMPTS, cache=auto, **settings)
    assert found.tokens == wanted.tokens
    assert kvjax.nbytes(found.cache, found.cache.mesh_sharding)["device"] <= tails
    limits = InferenceLimits(cache_memory_ratio=0.5, device_memory=10**7)
    few = kvjax.generate(lm, PROMPTS, limits=limits, max_new_tokens=3, **SHARED)
    assert few.stats.new_tokens == 9
    tight = InferenceLimits(cache_memory_ratio=0.001, device_memory=10**7)
    with pytest.raises(ValueError, match="the cache would take"):
        kvjax.generate(lm, PROMPTS, limits=tight, max_new_tokens=3)


def test_compiled_ahead_on_a_mesh(tiny_llama):
    lm = tiny_llama.on(mesh("2-2-2"))
    assert kvjax.compile(lm, "static", batch=3, max_len=64, **SHARED).programs > 2
    found = kvjax.generate(lm, PROMPTS, max_len=64, max_new_tokens=9, **SHARED)
    assert found.stats.compilations == 0
