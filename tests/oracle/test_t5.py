"""T5: logits, text and gradients are Transformers', and its encoder reads once. float32."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.models.files import find_tensors
from kvjax.models.t5 import buckets_of
from tests.oracle.conftest import randomise

TOLERANCE = 1e-5
"""Of logits, absolute."""
SOURCE, TARGET = (21, 9, 4), (18, 18, 11)
"""Tokens of each row that the encoder reads, and that the decoder is given."""
CHUNKS = 5, 1, 1, 11
NEW = 10

T5 = {
    "vocab_size": 67, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "t5": T5,
    "t5-1.1": {
        **T5, "d_model": 24, "d_kv": 4, "d_ff": 24, "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "t5-other": {
        **T5, "d_kv": 4, "num_layers": 3, "num_decoder_layers": 1, "feed_forward_proj": "silu",
        "relative_attention_num_buckets": 9, "relative_attention_max_distance": 13,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "decoder_start_token_id": 3,
    },
}  # fmt: skip
OWN_HEAD = ("t5-1.1",)
"""Of these, files have a head that is not the embedding."""


class Case(NamedTuple):
    """A checkpoint in a folder, Transformers' model of it, texts, and its logits of a target."""

    folder: Path
    theirs: Any
    texts: list[list[int]]
    target: np.ndarray
    logits: np.ndarray


def asked(torch: Any, texts: list[list[int]]) -> dict[str, Any]:
    """Padded texts as Transformers takes them."""
    tokens, mask = np.zeros((2, len(texts), max(map(len, texts))), np.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)], mask[row, : len(text)] = text, 1
    return {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask)}


@pytest.fixture(scope="module", params=list(CASES))
def case(
    request: pytest.FixtureRequest, torch: Any, transformers: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:  # fmt: skip
    folder = tmp_path_factory.mktemp(request.param)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**CASES[request.param]))
    if request.param in OWN_HEAD:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    randomise(model, torch).save_pretrained(folder)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    draw = np.random.default_rng(1)
    texts = [draw.integers(2, 67, count).tolist() for count in SOURCE]
    target = draw.integers(0, 67, (len(TARGET), max(TARGET)))
    with torch.no_grad():
        found = theirs(**asked(torch, texts), decoder_input_ids=torch.tensor(target))
    return Case(folder, theirs, texts, target, found.logits.numpy())


def load(case: Case) -> models.LanguageModel:
    return models.load(case.folder, dtype="float32")


def apart(found: Any, wanted: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(found) - wanted)))


def test_uncached(case: Case) -> None:
    lm = load(case).with_encoder_inputs(case.texts)
    logits = jax.jit(lm.apply)(lm.params, jnp.asarray(case.target))
    assert apart(logits, case.logits) <= TOLERANCE


def test_ragged_in_uneven_chunks(case: Case) -> None:
    lm = load(case).with_encoder_inputs(case.texts)
    cache = kvjax.init_cache(lm.config, batch=3, max_len=32)
    apply, start, found = jax.jit(lm.apply), 0, []
    for new in CHUNKS:
        lengths = jnp.clip(jnp.asarray(TARGET) - start, 0, new)
        part = jnp.asarray(case.target[:, start : start + new])
        logits, cache = apply(lm.params, part, cache, lengths=lengths)
        start += new
        found.append(logits)
    whole = np.concatenate(found, axis=1)
    for row, length in enumerate(TARGET):
        assert apart(whole[row, :length], case.logits[row, :length]) <= TOLERANCE


def test_greedy_tokens(case: Case, torch: Any) -> None:
    wanted = case.theirs.generate(
        **asked(torch, case.texts), max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )
    found = kvjax.generate(load(case), case.texts, max_new_tokens=NEW, eos_token_ids=())
    assert np.array_equal(np.asarray(found.tokens), wanted.numpy()[:, 1:])


def test_the_text_is_theirs(torch: Any, transformers: Any, tmp_path: Path) -> None:
    """From a text to a text, by a tokenizer that ends what it encodes; the encoder reads once."""
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    words = ["<pad>", "</s>", "<unk>", *(f"word{n}" for n in range(64))]
    own = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: n for n, w in enumerate(words)}, "<unk>")
    )
    own.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    own.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**CASES["t5-1.1"]))
    randomise(model, torch).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = ["word5 word9 word30", "word1", "word40 word7 word7 word12 word3"]
    asked = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    wanted = model.eval().generate(**asked, max_new_tokens=NEW, do_sample=False)
    lm = models.load(tmp_path, dtype="float32")
    found = kvjax.generate(lm, texts, max_new_tokens=NEW)
    assert found.text == tokenizer.batch_decode(wanted, skip_special_tokens=True)
    assert len(set(found.text)) == len(texts), "texts that are alike would show nothing"

    read = lm.with_encoder_inputs(texts)
    broken = jax.tree.map(lambda x: x * jnp.nan, read.params["encoder"])
    once = read.with_params(read.params | {"encoder": broken})
    start = [[lm.decoder_start_token_id]] * len(texts)
    assert kvjax.generate(once, start, max_new_tokens=NEW).text == found.text


def test_saved_again(case: Case, torch: Any, transformers: Any, tmp_path: Path) -> None:
    load(case).save(tmp_path / "again")
    names = [set(find_tensors(folder)) for folder in (case.folder, tmp_path / "again")]
    assert names[0] == names[1]
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        found = again(**asked(torch, case.texts), decoder_input_ids=torch.tensor(case.target))
    assert np.array_equal(found.logits.numpy(), case.logits)


def test_embeddings_that_a_file_holds_twice(case: Case, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    def written(name: str, times: float) -> models.LanguageModel:
        folder = shutil.copytree(case.folder, tmp_path / f"{name} {times}")
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = times * tensors["shared.weight"]
        if name.startswith("decoder"):
            del tensors["shared.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return models.load(folder, dtype="float32")

    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        lm = written(name, 1.0).with_encoder_inputs(case.texts)
        assert apart(jax.jit(lm.apply)(lm.params, case.target), case.logits) <= TOLERANCE
    with pytest.raises(kvjax.CheckpointError, match=r"encoder.embed_tokens.weight .*, but differ"):
        written("encoder.embed_tokens.weight", 2.0)


@pytest.mark.parametrize("both", [True, False])
def test_the_start_is_what_generation_settings_say(case: Case, both: bool, tmp_path: Path) -> None:
    folder = shutil.copytree(case.folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    if not both:
        del config["decoder_start_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 7}))
    lm = models.load(folder, dtype="float32")
    assert lm.decoder_start_token_id == 7
    asked = {"max_new_tokens": NEW, "eos_token_ids": ()}
    wanted = kvjax.generate(lm.with_encoder_inputs(case.texts), [[7]] * 3, **asked)
    assert kvjax.generate(lm, case.texts, **asked).tokens == wanted.tokens


def test_gradients(case: Case, torch: Any) -> None:
    """Of a loss, through the source that the encoder fills."""
    labels = torch.tensor(np.roll(case.target, -1, axis=1))
    model = case.theirs
    model.zero_grad()
    logits = model(**asked(torch, case.texts), decoder_input_ids=torch.tensor(case.target)).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    theirs = {
        name: parameter.grad.numpy() for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }  # fmt: skip
    lm = load(case)
    tokens, lengths = lm.encode(case.texts)

    def loss(params: Any) -> Any:
        empty = kvjax.init_cache(lm.config, batch=3, max_len=tokens.shape[1])
        source = lm.architecture.read(params, tokens, lengths, empty)
        logits = lm.apply(params | {"source": source}, jnp.asarray(case.target))
        told = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(told, jnp.asarray(labels.numpy())[..., None], -1))

    ours = jax.jit(jax.grad(loss))(lm.params)
    for name in (
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "encoder.block.1.layer.0.SelfAttention.q.weight",
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "decoder.block.0.layer.1.EncDecAttention.k.weight",
    ):
        leaf = ours
        for part in name.split("."):
            leaf = leaf[part]
        wanted = theirs[name]
        assert apart(leaf, wanted) <= 1e-4 * np.max(np.abs(wanted)), name


@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets(torch: Any, transformers: Any, both_ways: bool) -> None:
    theirs: Callable = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    for buckets, farthest in ((4, 3), (7, 20), (8, 8), (9, 13), (32, 128), (33, 129), (64, 1000)):
        distances = np.arange(-2 * farthest, 2 * farthest + 1)
        wanted = theirs(torch.tensor(distances), both_ways, buckets, farthest).numpy()
        found = buckets_of(buckets, farthest, both_ways=both_ways)
        assert np.array_equal(found[np.clip(distances, -farthest, farthest) + farthest], wanted)


def test_what_a_file_leaves_out(transformers: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours: Any = models.read_config(tmp_path)
    for name, other in {
        "vocab_size": "vocab_size", "hidden_size": "d_model", "head_dim": "d_kv",
        "intermediate_size": "d_ff", "num_encoder_layers": "num_layers",
        "num_hidden_layers": "num_decoder_layers", "num_attention_heads": "num_heads",
        "relative_attention_num_buckets": "relative_attention_num_buckets",
        "layer_norm_epsilon": "layer_norm_epsilon",
        "relative_attention_max_distance": "relative_attention_max_distance",
        "activation": "dense_act_fn",
        "is_gated_act": "is_gated_act", "tie_word_embeddings": "tie_word_embeddings",
        "scale_decoder_outputs": "scale_decoder_outputs",
    }.items():  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, other), name
