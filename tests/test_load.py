"""Loading: names, dtypes, shards, memory, and the message of every refusal."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax import models
from kvjax.core.target import Target, tracing_for
from kvjax.models.files import find_tensors
from tests.checkpoints import write_biased_keys, write_llama

Tensors = dict[str, np.ndarray]

GPT2 = {"model_type": "gpt2", "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2,
        "n_positions": 32, "activation_function": "gelu_new"}  # fmt: skip


@pytest.fixture
def folder(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "checkpoint"))


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def change_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = dict(load_file(folder / "model.safetensors"))
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def drop(tensors: Tensors, *names: str) -> None:
    for name in names:
        del tensors[name]


def shard(folder: Path) -> dict[str, Any]:
    """Cut the weights into two files with an index; gives the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, index = sorted(tensors), {"metadata": {}, "weight_map": {}}
    for number in (1, 2):
        file = f"model-{number:05}-of-00002.safetensors"
        part = {name: tensors[name] for name in names[number - 1 :: 2]}
        save_file(part, folder / file, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(part, file)
    write_index(folder, index)
    return index


def same(one: Any, other: Any) -> bool:
    """Whether all parameters are equal, compared without compiling."""
    arrays = (jax.tree.map(np.asarray, tree) for tree in (one, other))
    return jax.tree.all(jax.tree.map(np.array_equal, *arrays))


def write_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def gpt2_tensors() -> Tensors:
    rng, tensors = np.random.default_rng(0), {}
    shapes = {
        "wte.weight": (40, 16),
        "wpe.weight": (32, 16),
        "ln_f.weight": (16,),
        "ln_f.bias": (16,),
    }
    for i in range(2):
        for name, shape in {
            "ln_1": (16,), "attn.c_attn": (16, 48), "attn.c_proj": (16, 16), "ln_2": (16,),
            "mlp.c_fc": (16, 64), "mlp.c_proj": (64, 16),
        }.items():  # fmt: skip
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]}
    for name, shape in shapes.items():
        tensors[name] = rng.standard_normal(shape, dtype=np.float32)
    return tensors


def write_gpt2(folder: Path, tensors: Tensors, **fields: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**GPT2, **fields}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_parameters(tiny_llama_dir: Path, tiny_llama: models.LanguageModel) -> None:
    """The file's tensors under the parts of their names, float32, as uncommitted as
    what an optimizer makes of them."""
    stored = load_file(tiny_llama_dir / "model.safetensors")
    for name, tensor in stored.items():
        leaf: Any = tiny_llama.params
        for part in name.split("."):
            leaf = leaf[part]
        assert isinstance(leaf, jax.Array) and not leaf.committed
        np.testing.assert_array_equal(leaf, tensor)
    assert len(jax.tree.leaves(tiny_llama.params)) == len(stored)
    assert tiny_llama.generation.eos_token_ids == (257,)
    assert tiny_llama.source == str(tiny_llama_dir)


def test_apply_is_static(tiny_llama: models.LanguageModel) -> None:
    assert tiny_llama.apply == tiny_llama.architecture.apply
    assert hash(tiny_llama.architecture) == hash(models.Architecture(tiny_llama.config))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", jnp.bfloat16, np.float32, "f4"])
def test_dtype(folder: Path, dtype: Any) -> None:
    lm = models.load(folder, dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(lm.params)} == {jnp.dtype(dtype)}
    assert lm.config.dtype == jnp.dtype(dtype).name
    logits = jax.jit(lm.apply)(lm.params, jnp.ones((1, 3), jnp.int32))
    assert logits.dtype == np.float32 and bool(jnp.isfinite(logits).all())


def test_dtype_by_platform(folder: Path) -> None:
    """On a CPU float32; on an accelerator what ``config.json`` says, or what the weights are."""
    change_config(folder, torch_dtype="bfloat16")
    assert models.load(folder).config.dtype == "float32"
    with tracing_for(Target("gpu", (8, 0))):
        assert models.load(folder).config.dtype == "bfloat16"
        change_config(folder, torch_dtype=None)
        change_tensors(folder, lambda t: t.update({k: v.astype(np.float16) for k, v in t.items()}))
        assert models.load(folder).config.dtype == "float16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameters_are_not_copied(folder: Path, dtype: str) -> None:
    # Of one stretch of memory: JAX has taken each where it was read to.
    if jax.default_backend() != "cpu":
        pytest.skip("on an accelerator parameters are copied to its memory")
    params = jax.tree.leaves(models.load(folder, dtype=dtype).params)
    places = sorted((x.unsafe_buffer_pointer(), x.nbytes) for x in params)
    for (start, nbytes), (after, _) in pairwise(places):
        assert start % 64 == 0 and 0 <= after - start - nbytes < 64


def test_parameters_can_be_donated(folder: Path) -> None:
    lm = models.load(folder)
    before = jax.tree.map(np.array, lm.params)
    scaled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)(lm.params)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(scaled), strict=True):
        np.testing.assert_array_equal(2 * old, new)


@pytest.mark.parametrize("dtype", ["float64", "int8", "double", 3])
def test_unknown_dtype(folder: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match="expected one of bfloat16, float16, float32"):
        models.load(folder, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stored_dtypes(folder: Path, dtype: str, tiny_llama: models.LanguageModel) -> None:
    """16-bit weights are widened exactly."""
    kind = jnp.dtype(dtype)
    change_tensors(folder, lambda t: t.update({k: v.astype(kind) for k, v in t.items()}))
    lm = models.load(folder, dtype="float32")
    for found, exact in zip(*map(jax.tree.leaves, (lm.params, tiny_llama.params)), strict=True):
        np.testing.assert_array_equal(found, np.asarray(exact).astype(kind).astype(np.float32))


def test_shards(folder: Path, tiny_llama: models.LanguageModel) -> None:
    shard(folder)
    lm = models.load(folder)
    assert jax.tree.structure(lm.params) == jax.tree.structure(tiny_llama.params)
    assert same(lm.params, tiny_llama.params)


def test_without_a_head(folder: Path, tiny_llama: models.LanguageModel) -> None:
    """A model saved without its head lacks the prefix; buffers of old files are left out."""

    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    change_tensors(folder, strip)
    assert same(models.load(folder).params, tiny_llama.params)


def test_tied_head(folder: Path) -> None:
    """A stored head that is the embedding is left out; either of the two will do; one that
    differs counts."""
    embedding = "model.embed_tokens.weight"
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t[embedding]}))
    assert "lm_head" not in models.load(folder).params
    change_tensors(folder, lambda t: drop(t, embedding))
    lm = models.load(folder)
    assert "lm_head" not in lm.params and lm.config.tie_word_embeddings
    change_tensors(folder, lambda t: t.update({embedding: t["lm_head.weight"] + 1}))
    lm = models.load(folder)
    assert not lm.config.tie_word_embeddings
    assert (
        lm.params["lm_head"]["weight"] + 1 == lm.params["model"]["embed_tokens"]["weight"]
    ).all()


def test_gpt2_with_and_without_its_prefix(tmp_path: Path) -> None:
    tensors = gpt2_tensors()
    bare = models.load(write_gpt2(tmp_path / "bare", tensors))
    buffers = {"h.0.attn.bias": np.ones((1, 1, 32, 32), np.uint8),
               "h.0.attn.masked_bias": np.float32(-1e4)}  # fmt: skip
    named = {f"transformer.{k}": np.asarray(v) for k, v in {**tensors, **buffers}.items()}
    whole = models.load(write_gpt2(tmp_path / "whole", named))
    assert same(bare.params, whole.params)
    weight = whole.params["transformer"]["h"]["0"]["attn"]["c_attn"]["weight"]
    np.testing.assert_array_equal(weight, tensors["h.0.attn.c_attn.weight"].T)
    assert whole.tokenizer is None
    assert whole.generation.eos_token_ids == (50256,)
    with pytest.raises(ValueError, match="has no tokenizer: give token ids instead"):
        whole.encode("text")


def test_gpt2_has_so_many_positions(tmp_path: Path) -> None:
    lm = models.load(write_gpt2(tmp_path / "gpt2", gpt2_tensors()))
    with pytest.raises(ValueError, match="33 tokens a row, but the model has only 32 positions"):
        lm.apply(lm.params, jnp.zeros((1, 33), jnp.int32))
    with pytest.raises(ValueError, match="max_len is 33, but the model has only 32 positions"):
        kvjax.init_cache(lm.config, max_len=33)


def test_gpt2_misshapen(tmp_path: Path) -> None:
    tensors = gpt2_tensors()
    tensors["h.1.mlp.c_fc.weight"] = tensors["h.1.mlp.c_fc.weight"].T.copy()
    folder = write_gpt2(tmp_path / "gpt2", tensors)
    message = r"h.1.mlp.c_fc.weight has shape \[64, 16\]; expected \[16, 64\] according to"
    with pytest.raises(kvjax.CheckpointError, match=message):
        models.load(folder)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: drop(t, NORM), f"missing tensor {NORM}"),
        (
            lambda t: drop(t, *[name for name in t if "layers.1" in name]),
            r"missing tensors model\.layers\.1\..*, .*, .* and 6 more",
        ),
        (lambda t: t.update(score=t[NORM]), "surplus tensor score: the model described"),
        (
            lambda t: t.update({"norm.weight": t[NORM] + 1}),
            "norm.weight and norm.weight are the same parameter of this model, but differ|"
            f"norm.weight and {NORM} are the same parameter of this model, but differ",
        ),
        (lambda t: t.update({NORM: t[NORM][:9]}), rf"{NORM} has shape \[9\]; expected \[64\]"),
        (
            lambda t: t.update({NORM: t[NORM].astype(np.int64)}),
            f"{NORM} has dtype I64; expected one of F32, F16, BF16, F64: quantized weights are not",
        ),
        (
            lambda t: t.update({NORM: t[NORM].astype(jnp.float8_e4m3fn)}),
            f"{NORM} has dtype F8_E4M3; expected one of F32, F16, BF16, F64: quantized weights are",
        ),
    ],
)
def test_wrong_tensors(folder: Path, change: Callable, message: str) -> None:
    change_tensors(folder, change)
    with pytest.raises(kvjax.CheckpointError, match=rf"model\.safetensors: .*{message}"):
        models.load(folder)


def test_untied_head_is_missing(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=False)
    with pytest.raises(kvjax.CheckpointError, match=r"missing tensor lm_head\.weight"):
        models.load(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_truncated(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(kvjax.CheckpointError, match=r"model\.safetensors: truncated"):
        models.load(folder)


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]}}',
     b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
     b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}',
     b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-8, 4]}}'],
)  # fmt: skip
def test_senseless_header(folder: Path, header: bytes) -> None:
    content = len(header).to_bytes(8, "little") + header + bytes(64)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(kvjax.CheckpointError, match="the header is not one of a safetensors file"):
        models.load(folder)


def test_bytes_do_not_fit_the_shape(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[NORM]["data_offsets"][1] -= 4
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + length :])
    with pytest.raises(kvjax.CheckpointError, match=f"{NORM} has 252 bytes, which does not fit"):
        models.load(folder)


def test_wrong_index(folder: Path) -> None:
    index = shard(folder)
    file = index["weight_map"][NORM]
    for weight_map, message in (
        ({**index["weight_map"], NORM: "model-00009.safetensors"}, "there is no file model-00009"),
        ({**index["weight_map"], NORM: f"../checkpoint/{file}"}, "there is no file ../checkpoint"),
        ({**index["weight_map"], "more": file}, f"{file}: the tensor more is missing"),
        (["a"], "weight_map: expected an object of file names"),
    ):
        write_index(folder, {"weight_map": weight_map})
        with pytest.raises(kvjax.CheckpointError, match=message):
            models.load(folder)


def test_a_shard_is_truncated(folder: Path) -> None:
    file = folder / shard(folder)["weight_map"][NORM]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(kvjax.CheckpointError, match=f"{file.name}: truncated"):
        models.load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_other_formats(folder: Path, name: str) -> None:
    """Nothing is unpickled: the message says how to convert."""
    (folder / "model.safetensors").rename(folder / name)
    message = rf"the weights are in {name}, which is not read.*from_pretrained\("
    with pytest.raises(kvjax.CheckpointError, match=message):
        models.load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(kvjax.CheckpointError, match=r"no weights: expected model\.safetensors or"):
        models.load(folder)


def test_no_tensor(folder: Path) -> None:
    save_file({}, folder / "model.safetensors")
    with pytest.raises(kvjax.CheckpointError, match="contain no tensor"):
        models.load(folder)


def test_unreadable_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    message = r"model\.safetensors: can't be read: .*Permission denied"
    with pytest.raises(kvjax.CheckpointError, match=message):
        models.load(folder)


def test_tokenizer_model_only(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(kvjax.CheckpointError, match=r"tokenizer\.model, which is not read"):
        models.load(folder)


OTHERS: Tensors = {
    "vision_tower.layers.0.weight": np.ones((4, 4), np.float32),
    "vision_tower.position_ids": np.arange(4),
    "multi_modal_projector.linear.weight": np.ones(6, np.float16),
}
WITHOUT = (
    "kvjax: only the text part is loaded, without multi_modal_projector (1 tensor, 12 B), "
    "vision_tower (2 tensors, 96 B)\n"
)


def make_whole(folder: Path, layout: str = "language_model.model.") -> None:
    """Make a Llama the text part of a LLaVA, ``layout`` before its names in place of ``model.``."""
    text = json.loads((folder / "config.json").read_text())
    ids = {name: text.pop(name) for name in ("eos_token_id", "bos_token_id")}
    tied, dtype = text.pop("tie_word_embeddings"), text.pop("torch_dtype")
    whole = {"model_type": "llava", "text_config": text, "vision_config": {"hidden_size": 4}}
    whole |= {"tie_word_embeddings": tied, "dtype": dtype, **ids}
    (folder / "config.json").write_text(json.dumps(whole))
    head = "language_model." if layout == "language_model.model." else ""

    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            new = layout + name.removeprefix("model.") if "model." in name else head + name
            tensors[new] = tensors.pop(name)
        inside = "" if head else "model."
        tensors |= {inside + name: tensor for name, tensor in OTHERS.items()}

    change_tensors(folder, rename)


@pytest.mark.parametrize(
    "layout", ["language_model.model.", "model.language_model.", "model.text_model.", "model."]
)
@pytest.mark.parametrize("tied", [True, False])
def test_text_part(folder, tiny_llama, tmp_path, capsys, layout: str, tied: bool) -> None:
    """The same model, to the last bit, as the checkpoint of the text part alone."""
    alone = tiny_llama
    if not tied:
        write_llama(folder, tie_word_embeddings=False)
        alone = models.load(folder)
    make_whole(folder, layout)
    capsys.readouterr()
    lm = models.load(folder)
    assert capsys.readouterr().err == WITHOUT
    assert lm.config == alone.config and lm.generation == alone.generation
    assert jax.tree.structure(lm.params) == jax.tree.structure(alone.params)
    assert same(lm.params, alone.params)
    messages = [{"role": "user", "content": "Hi"}]
    assert lm.tokenizer.chat(messages) == alone.tokenizer.chat(messages)
    if layout == "model.language_model." and tied:
        logits = [jax.jit(m.apply)(m.params, jnp.ones((1, 3), jnp.int32)) for m in (lm, alone)]
        np.testing.assert_array_equal(*logits)
    # Saved, it is a checkpoint of the text model alone.
    lm.save(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert "text_config" not in written and "vision_config" not in written
    again = models.load(tmp_path / "saved")
    assert capsys.readouterr().err == ""
    assert again.config == alone.config and same(again.params, alone.params)
    assert again.generation == alone.generation


def test_text_part_in_a_flat_config(folder, tmp_path, capsys) -> None:
    """Qwen2.5-VL as it was published: the text's fields and tensors where a text model has them."""
    bias = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    alone = models.load(write_biased_keys(tmp_path / "qwen2", folder, bias))
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    change_config(tmp_path / "qwen2", model_type="qwen2_5_vl", rope_scaling=rope,
                  vision_config={"depth": 1}, image_token_id=9)  # fmt: skip
    change_tensors(tmp_path / "qwen2", lambda t: t.update({"visual.merger.weight": t[NORM]}))
    lm = models.load(tmp_path / "qwen2")
    assert capsys.readouterr().err.endswith("without visual (1 tensor, 256 B)\n")
    assert lm.config == alone.config and same(lm.params, alone.params)
    lm.save(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["architectures"] == ["Qwen2ForCausalLM"]
    assert not {"vision_config", "image_token_id"} & set(written)
    assert models.load(tmp_path / "saved").config == alone.config


def test_files_of_other_parts_alone_may_be_missing(folder, tiny_llama, capsys) -> None:
    """Their tensors are counted by the index; bytes are named of those that are there."""
    make_whole(folder)
    tensors = dict(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    towers = {name for name in tensors if name.startswith("vision_tower")}
    places = {name: "vision.safetensors" if name in towers else "x.safetensors" for name in tensors}
    text = {name: x for name, x in tensors.items() if name not in towers}
    save_file(text, folder / "x.safetensors")
    write_index(folder, {"weight_map": places})
    lm = models.load(folder)
    assert same(lm.params, tiny_llama.params)
    assert capsys.readouterr().err == WITHOUT.replace("2 tensors, 96 B", "2 tensors")
    save_file({name: tensors[name] for name in towers}, folder / "vision.safetensors")
    models.load(folder)
    assert capsys.readouterr().err == WITHOUT
    (folder / "x.safetensors").unlink()
    with pytest.raises(kvjax.CheckpointError, match=r"there is no file x\.safetensors"):
        models.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(qformer=t["vision_tower.position_ids"]), "surplus tensor qformer: the"),
        (
            lambda t: t.update({"language_model.visual.x": np.ones(2, np.float32)}),
            r"surplus tensor visual\.x: the",
        ),
        (
            lambda t: t.update({"model.language_model.norm.weight": np.ones(64, np.float32)}),
            rf"{NORM} and model\.language_model\.norm\.weight are the same parameter",
        ),
        (lambda t: drop(t, f"language_model.{NORM}"), rf"missing tensor {NORM}"),
        (
            lambda t: drop(t, *[name for name in t if "language_model" in name]),
            "contain no tensor of a text model",
        ),
    ],
)
def test_wrong_tensors_of_a_whole(folder: Path, change: Callable, message: str) -> None:
    make_whole(folder)
    change_tensors(folder, change)
    with pytest.raises(kvjax.CheckpointError, match=message):
        models.load(folder)


def test_a_config_of_the_text_alone_beside_all_tensors(folder, tiny_llama, capsys) -> None:
    whole = (folder / "config.json").read_text()
    make_whole(folder)
    (folder / "config.json").write_text(whole)
    assert same(models.load(folder).params, tiny_llama.params)
    assert capsys.readouterr().err == WITHOUT


@pytest.mark.parametrize("names", [None, ("model.norm.weight",)])
def test_float64(folder: Path, tiny_llama, capsys, names: tuple | None) -> None:
    """Read as float32, and said once; what is computed in is chosen as before."""
    wide = names or tuple(load_file(folder / "model.safetensors"))
    change_tensors(folder, lambda t: t.update({k: t[k].astype(np.float64) for k in wide}))
    lm = models.load(folder)
    count = "1 float64 tensor" if names else f"{len(wide)} float64 tensors"
    assert capsys.readouterr().err == f"kvjax: {count} read as float32\n"
    assert lm.config == tiny_llama.config and same(lm.params, tiny_llama.params)
    change_config(folder, torch_dtype=None)
    with tracing_for(Target("gpu", (8, 0))):
        assert models.load(folder).config.dtype == "float32"
        change_config(folder, torch_dtype="float64")
        assert models.load(folder).config.dtype == "float32"
    half = models.load(folder, dtype="bfloat16").params["model"]["norm"]["weight"]
    np.testing.assert_array_equal(
        half, tiny_llama.params["model"]["norm"]["weight"].astype("bfloat16")
    )


def test_float64_beyond_float32(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({NORM: t[NORM].astype(np.float64) * 1e39}))
    with pytest.raises(kvjax.CheckpointError, match=rf"{NORM} is float64 and exceeds the range of"):
        models.load(folder)


def test_buffers_of_any_dtype_are_ignored(folder: Path, tiny_llama, capsys) -> None:
    """Those that Transformers ignores; nor do they tell what the weights are stored in."""
    change_config(folder, torch_dtype=None)

    def add(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name] = tensors[name].astype(np.float16)
        buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
        tensors[buffer] = np.zeros(1_000_000, np.int64)

    change_tensors(folder, add)
    with tracing_for(Target("gpu", (8, 0))):
        assert models.load(folder).config.dtype == "float16"
    assert capsys.readouterr().err == ""


MEASURE = """
import gc, sys
import jax, jax.numpy as jnp
from kvjax import models

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

jax.block_until_ready(jnp.zeros(8) + 1)
models.load(sys.argv[1], dtype=sys.argv[3])
gc.collect()
before = status("VmRSS")
lm = models.load(sys.argv[2], dtype=sys.argv[3])
size = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params)) / 2**20
print(status("VmHWM") - before, size)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("float32", "float32"), pytest.param("bfloat16", "float32", marks=pytest.mark.rare)],
)
def test_peak_of_memory(tiny_llama_dir: Path, tmp_path: Path, stored: str, dtype: str) -> None:
    """The peak is at most a fifth more than the parameters."""
    folder = write_llama(
        tmp_path / "large",
        dtype=jnp.dtype(stored),
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
    )
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tiny_llama_dir), str(folder), dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, size = map(float, done.stdout.split())
    assert size > 150
    assert peak <= 1.2 * size


_LOADED = """
import json, resource, sys
import jax
import kvjax
from kvjax import models

def resident():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(fields["VmHWM"].split()[0]) * 1024

jax.block_until_ready(jax.device_put(0))
over = kvjax.make_mesh(**json.loads(sys.argv[2]))
before = resident()
lm = models.load(sys.argv[1], dtype="float32", mesh=over)
leaves = jax.tree.leaves(lm.params)
each = {
    str(device): sum(
        s.data.nbytes for x in leaves for s in x.addressable_shards if s.device == device
    )
    for device in over.devices.flat
}
print(json.dumps({"grown": resident() - before, "each": each}))
"""


@pytest.fixture(scope="module")
def wide_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a quarter of a GB, half of it one tensor."""
    return write_llama(
        tmp_path_factory.mktemp("wide") / "llama", hidden_size=512, intermediate_size=4096,
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, head_dim=64,
        vocab_size=65536,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the most resident is read from /proc")
@pytest.mark.parametrize(
    "mesh", [{"tensor": 8}, pytest.param({"data": 2, "tensor": 4}, marks=pytest.mark.rare)]
)
def test_a_checkpoint_is_loaded_straight_to_its_shares(wide_llama_dir, mesh):
    folder = wide_llama_dir
    run = subprocess.run(
        [sys.executable, "-c", _LOADED, str(folder), json.dumps(mesh)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout)
    whole = sum(tensor.count for tensor in find_tensors(folder).values())
    largest = max(tensor.count for tensor in find_tensors(folder).values())
    # All devices are of this process: beside what they have there was one tensor, and no more. A
    # device has its share, and whole what is not divided: the norms.
    assert found["grown"] < sum(found["each"].values()) + 1.25 * largest
    for size in found["each"].values():
        assert size == pytest.approx(whole / mesh["tensor"], rel=0.01)
        assert size < largest
