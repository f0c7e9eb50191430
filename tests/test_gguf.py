"""Models in GGUF files: every architecture and block type, shards, and damaged files."""

import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs the package gguf (the extra `gguf`)")

from benchmarks.gguf_file import floats, write_gguf  # noqa: E402
from kvjax import models  # noqa: E402
from kvjax.core.target import Target, tracing_for  # noqa: E402
from kvjax.core.validation import CheckpointError  # noqa: E402
from kvjax.models import gguf as gguf_package  # noqa: E402
from kvjax.models.gguf import find_gguf, read_generation, read_gguf  # noqa: E402
from kvjax.models.weights import flatten  # noqa: E402
from tests.gguf_files import (  # noqa: E402
    MODELS,
    RawFile,
    write_random,
)

Types = gguf.GGMLQuantizationType


def write_model(folder: Path, name: str, **options: Any) -> tuple[Any, Any, Path]:
    """A small random model as a GGUF file."""
    folder.mkdir(exist_ok=True)
    file = folder / "model.gguf"
    return *write_random(file, name, **options), file


@pytest.mark.slow(but=("llama-3", "gemma3"))
@pytest.mark.parametrize("name", MODELS)
def test_architectures(name: str, tmp_path: Path) -> None:
    """The file gives the parameters and the logits of the model that it was written from."""
    architecture, params, file = write_model(tmp_path, name)
    lm = models.load(file)
    wanted, loaded = dict(flatten(params)), dict(flatten(lm.params))
    assert loaded.keys() == wanted.keys()
    # Norms of Gemma are stored plus 1, which rounds them.
    atol = 1e-6 if "gemma" in name else 0
    for parameter, values in wanted.items():
        np.testing.assert_allclose(loaded[parameter], values, rtol=0, atol=atol, err_msg=parameter)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (2, 40)))
    logits = architecture.apply(params, tokens)
    # Divisors of frequencies are stored in float32.
    np.testing.assert_allclose(lm.apply(lm.params, tokens), logits, rtol=0, atol=3e-5)
    assert lm.source == str(file) and lm.tokenizer is None
    assert models.read_config(file).hidden_size == 32


def test_epsilon_is_the_one_that_was_written(tmp_path: Path) -> None:
    """float32 metadata becomes the decimal number that it was rounded from."""
    architecture, _, file = write_model(tmp_path, "llama")
    assert models.read_config(file).rms_norm_eps == architecture.config.rms_norm_eps == 1e-6


@pytest.mark.parametrize(("dtype", "expected"), [("float16", "float16"), ("bfloat16", "bfloat16")])
def test_dtypes(dtype: str, expected: str, tmp_path: Path) -> None:
    """On an accelerator a model computes in the dtype of most of its bytes."""
    _, params, file = write_model(tmp_path, "qwen2", types=floats(dtype))
    lm = models.load(file)
    assert lm.config.dtype == "float32"
    one = params["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"]
    rounded = jnp.asarray(one, expected).astype(jnp.float32)
    np.testing.assert_array_equal(
        lm.params["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"], rounded
    )
    with tracing_for(Target("gpu", (8, 0))):
        assert models.load(file).config.dtype == expected


def test_quantized_types_compute_in_bfloat16_on_accelerators(tmp_path: Path) -> None:
    def types(name: str, x: np.ndarray) -> Any:
        return Types.Q8_0 if x.ndim > 1 and x.shape[-1] % 32 == 0 else Types.F32

    _, _, file = write_model(tmp_path, "llama", types=types)
    assert models.read_config(file).dtype == "bfloat16"
    assert {tensor.dtype for tensor in read_gguf(file).tensors.values()} == {"Q8_0", "F32"}
    assert models.load(file).config.dtype == "float32"


def package_decodes(kind: Any) -> bool:
    """Whether the package itself decodes a type: tried on one block."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


FLOATS = ("F32", "F16", "BF16", "F64")
DECODED = [kind for kind in Types if package_decodes(kind)]
OTHERS = [kind for kind in Types if kind not in DECODED and kind.name not in FLOATS]


@pytest.mark.parametrize("kind", DECODED, ids=lambda kind: kind.name)
def test_block_types(kind: Any, tmp_path: Path) -> None:
    """Random blocks of every type give the numbers of the package's own decoding."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows, blocks = (3, 2), 4
    raw = np.random.default_rng(int(kind)).integers(0, 256, (*rows, blocks * nbytes), np.uint8)
    shape, data = (*rows, blocks * block), raw.tobytes()
    file = RawFile(data=data).tensor("x", shape[::-1], int(kind), 0)
    tensor = read_gguf(file.write(tmp_path / "x.gguf")).tensors["x"]
    assert (tensor.shape, tensor.dtype, tensor.count) == (shape, kind.name, len(data))
    with np.errstate(all="ignore"):  # random scales may be NaN
        wanted = gguf.dequantize(raw, kind).astype(np.float32)
        np.testing.assert_array_equal(tensor.read().astype(np.float32), wanted.reshape(shape))


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.name)
def test_types_that_the_package_cannot_decode(kind: Any, tmp_path: Path) -> None:
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    file = RawFile(data=bytes(nbytes)).tensor("x", (block,), int(kind), 0)
    message = f"x has the type {kind.name}, which the package gguf can't decode"
    with pytest.raises(CheckpointError, match=message):
        read_gguf(file.write(tmp_path / "x.gguf"))


def test_metadata(tmp_path: Path) -> None:
    """Every type of value, as the package reads it."""
    file = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    values = {
        "uint8": 200, "int8": -3, "uint16": 60000, "int16": -9, "uint32": 2**32 - 1,
        "int32": -70000, "uint64": 2**63, "int64": -(2**40), "float32": 0.1, "float64": 1e-300,
        "bool": True, "string": "naïve ☃", "array": ["a", "", "☃"],
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.numbers", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_gguf(file).metadata
    assert {k.removeprefix("x."): v for k, v in metadata.items() if k[2:] in values} == values
    assert list(metadata["x.numbers"]) == [1, 2, 3]


def test_shards(tmp_path: Path) -> None:
    """A model in several files loads from the first, or from the folder."""
    _, params, file = write_model(tmp_path / "one", "llama")
    folder = tmp_path / "shards"
    folder.mkdir()
    whole = gguf.GGUFReader(file)
    for number in range(3):
        writer = gguf.GGUFWriter(folder / f"m-{number + 1:05}-of-00003.gguf", "llama")
        if number == 0:
            for key, entry in whole.fields.items():
                if key.startswith("llama."):
                    value = entry.contents()
                    write = writer.add_float32 if isinstance(value, float) else writer.add_uint32
                    write(key, value)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(whole.tensors))
        for tensor in whole.tensors[number::3]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    lm = models.load(folder)
    jax.tree.map(np.testing.assert_array_equal, lm.params, params)
    (folder / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf"):
        models.load(folder)
    only = (folder / "m-00001-of-00003.gguf").rename(folder / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"split\.count is 3, so its name must end in"):
        models.load(only)


def test_folders(tmp_path: Path) -> None:
    """A folder with one model is that model; with several, an error lists them."""
    for name in ("a.Q4_0.gguf", "mmproj-a.gguf", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    assert find_gguf(tmp_path) == tmp_path / "a.Q4_0.gguf"
    (tmp_path / "a.Q8_0.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"2 models: a\.Q4_0\.gguf, a\.Q8_0\.gguf; give"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_gguf(tmp_path) is None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"general.architecture": "mamba"},
        r"general\.architecture is 'mamba'; expected one of cohere2, gemma2, gemma3",
    ),
    "adapter": ({"general.type": "adapter"}, r"general\.type is 'adapter'; expected model"),
    "unknown key": (
        {"llama.attention.new_thing": 3},
        r"llama\.attention\.new_thing is 3; expected a file without this key",
    ),
    "wrong type": ({"llama.block_count": "two"}, r"llama\.block_count is 'two'; expected an int"),
    "zero": ({"llama.embedding_length": 0}, r"llama\.embedding_length is 0; expected an integer"),
    "infinite": (
        {"llama.rope.freq_base": float("inf")},
        r"llama\.rope\.freq_base is inf; expected a finite number above 0",
    ),
    "rope type": (
        {"llama.rope.scaling.type": "spiral"},
        r"llama\.rope\.scaling\.type is 'spiral'; expected none, linear, yarn or longrope",
    ),
    "value width": (
        {"llama.attention.value_length": 4},
        r"llama\.attention\.value_length is 4; expected llama\.attention\.key_length = 8",
    ),
    "a part of the channels": (
        {"llama.rope.dimension_count": 4},
        r"llama\.rope\.dimension_count is 4; expected 8, the width of a head",
    ),
    "no factors": (
        {"llama.rope.scaling.type": "longrope"},
        r"rope\.scaling\.type is 'longrope'; expected none, linear or yarn: the file has no",
    ),
    "per layer": (
        {"llama.attention.head_count": [4, 2]},
        r"llama\.attention\.head_count is .* expected the same value in all layers",
    ),
    "not causal": ({"llama.attention.causal": False}, r"llama\.attention\.causal is False; exp"),
    "end token": (
        {"tokenizer.ggml.eos_token_id": "x"},
        r"tokenizer\.ggml\.eos_token_id is 'x'; expected a token id",
    ),
    "temperature": (
        {"general.sampling.temp": -1.0},
        r"general\.sampling\.temp is -1\.0; expected a number of at least 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_metadata(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that kvjax does not understand are errors that name the key."""
    entries, message = WRONG[name]
    _, _, file = write_model(tmp_path, "llama")
    change_metadata(monkeypatch, entries)
    with pytest.raises(CheckpointError, match=message) as caught:
        models.load(file)
    assert str(file) in str(caught.value)


def test_tensors_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, params, file = write_model(tmp_path, "llama")
    tensors = {key: np.asarray(leaf) for key, leaf in flatten(params)}

    def write(**changed: np.ndarray | None) -> None:
        names = {"up": "model.layers.0.mlp.up_proj.weight", "q": "model.layers.0.self_attn.q_proj"}
        for short, values in changed.items():
            name = names.get(short, short)
            tensors.pop(name, None)
            if values is not None:
                tensors[name] = values
        write_gguf(architecture.config, tensors, file)

    write(up=None)
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ffn_up\.weight is missing, which"):
        models.load(file)
    write(up=np.zeros((48, 16), np.float32))
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight has the shape \[48, 16\]; expected"):
        models.load(file)
    write(up=np.zeros((48, 32), np.float32))
    assert models.load(file)
    original = gguf_package.read_gguf

    def fused(path: Path) -> Any:
        read = original(path)
        names = {"blk.0.attn_q.weight": "blk.0.attn_qkv.weight"}
        renamed = {names.get(name, name): tensor for name, tensor in read.tensors.items()}
        return type(read)(read.path, read.metadata, renamed)

    monkeypatch.setattr(gguf_package, "read_gguf", fused)
    with pytest.raises(CheckpointError, match=r"attn_q\.weight is missing.*in one tensor, which"):
        models.load(file)


def change_metadata(monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, Any]) -> None:
    """Read every file with other metadata; None removes a key."""
    original = gguf_package.read_gguf

    def changed(path: Path) -> Any:
        read = original(path)
        arrays = {k: np.array(v) if isinstance(v, list) else v for k, v in changes.items()}
        metadata = {k: v for k, v in {**read.metadata, **arrays}.items() if v is not None}
        return type(read)(read.path, metadata, read.tensors)

    monkeypatch.setattr(gguf_package, "read_gguf", changed)


HARMLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "both epsilons": ("qwen2", {"qwen2.attention.layer_norm_epsilon": 0.5}),
    "an unused factor": (
        "qwen2",
        {"qwen2.rope.scaling.type": "none", "qwen2.rope.scaling.factor": 4.0},
    ),
    "no shared expert": ("qwen3moe", {"qwen3moe.expert_shared_feed_forward_length": 0}),
    "gating by softmax": ("qwen3moe", {"qwen3moe.expert_gating_func": 1}),
    "pooling": ("llama", {"llama.pooling_type": 0, "llama.tensor_data_layout": "Meta AI"}),
    "gemma2's pattern": ("gemma2", {"gemma2.attention.sliding_window_pattern": 2}),
    "cohere2's pattern": ("cohere2", {"cohere2.attention.sliding_window_pattern": 4}),
    "gemma3's pattern, by layer": (
        "gemma3",
        {"gemma3.attention.sliding_window_pattern": [True] * 5 + [False, True]},
    ),
    "widths by layer": ("llama", {"llama.feed_forward_length": [48, 48]}),
    "merged shards": ("llama", {"split.count": 0}),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_keys(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of real files that do not change the model."""
    model, changes = HARMLESS[name]
    _, _, file = write_model(tmp_path, model)
    config = models.load(file).config
    change_metadata(monkeypatch, changes)
    assert models.load(file).config == config


def test_meaningful_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that the writer of these tests does not use."""
    _, _, file = write_model(tmp_path, "llama")
    _, _, gemma = write_model(tmp_path / "gemma", "gemma3")

    def rope_of(path: Path, **changes: Any) -> Any:
        with monkeypatch.context() as patch:
            change_metadata(patch, {f"llama.rope.{k}": v for k, v in changes.items()})
            return models.read_config(path).rope

    assert rope_of(file, **{"scaling.factor": 4.0}).rope_type == "linear"
    assert dict(rope_of(file, scale_linear=2.0).parameters) == {"factor": 2.0}
    yarn = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_beta_fast": 16.0}
    found = dict(rope_of(file, **yarn, **{"scaling.yarn_attn_factor": 1.5}).parameters)
    assert (found["attention_factor"], found["beta_fast"]) == (1.5, 16.0)
    found = dict(rope_of(file, **yarn, **{"scaling.attn_factor": 2.0}).parameters)
    assert found["attention_factor"] == pytest.approx(2 * (1 + 0.1 * np.log(4.0)))
    change_metadata(
        monkeypatch,
        {"gemma3.attention.sliding_window": None, "gemma3.rope.freq_base_swa": 5e3},
    )
    config = models.read_config(gemma)
    assert config.windows == (None,) * 7 and config.local_rope.theta == 5e3
    change_metadata(monkeypatch, {"gemma3.attention.scale": 0.5})
    assert models.read_config(gemma).query_scale == 0.5


def test_wide_activations_avoid_float16(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Gemma's float16 files are computed in bfloat16, or in float32 where there is none."""
    _, _, file = write_model(tmp_path, "gemma3", types=floats("float16"))
    with tracing_for(Target("gpu", (8, 0))):
        assert models.load(file).config.dtype == "bfloat16"
    assert (
        "gemma3_text exceeds the range of float16, computing in bfloat16" in capsys.readouterr().err
    )
    with tracing_for(Target("gpu", (7, 5))):
        assert models.load(file).config.dtype == "float32"


UNSAFE = "a\nb\x1b[31mc" + "d" * 40


def test_messages_are_one_short_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the metadata has for keys and values."""
    _, _, model = write_model(tmp_path / "model", "llama")
    for changes in (
        {f"llama.{UNSAFE}": 1},
        {"llama.block_count": "x\n" * 10**6},
        {"llama.attention.head_count": list(range(100))},
        {"general.architecture": UNSAFE},
        {"general.sampling.temp": list(range(100))},
        {"tokenizer.ggml.eos_token_id": "x\n" * 10**6},
        {"llama.rope.scaling.type": [1.0, 2.0]},
        {"llama.rope.scale_linear": [1.0, 2.0]},
        {"tokenizer.ggml.eos_token_id": [1, 2]},
        {"llama.rope.scaling.yarn_ext_factor": [1.0, 2.0], "llama.rope.scaling.type": "yarn"},
    ):
        with monkeypatch.context() as patch, pytest.raises(CheckpointError) as caught:
            change_metadata(patch, changes)
            models.load(model)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 500, changes


def test_sizes_that_the_tensors_do_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a claimed size is allocated: of layers, experts, heads, or factors."""
    _, _, file = write_model(tmp_path, "qwen3moe")
    for key in ("block_count", "embedding_length", "attention.head_count",
                "attention.head_count_kv", "attention.key_length", "expert_count",
                "expert_used_count", "expert_feed_forward_length"):  # fmt: skip
        for size in (1000, 2**31, 2**63):
            with monkeypatch.context() as patch:
                change_metadata(patch, {f"qwen3moe.{key}": size})
                tracemalloc.start()
                with pytest.raises(CheckpointError):
                    models.load(file)
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert peak < 2**25, f"{key} {size}: {peak:,} bytes"


def test_end_tokens(tmp_path: Path) -> None:
    """The ids that the file names, and control tokens known to end a message."""
    tokens = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|end|>", "a"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2**32 - 1,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    _, _, file = write_model(tmp_path, "llama", metadata=metadata)
    generation = read_generation(read_gguf(file))
    assert generation.eos_token_ids == (2, 3)  # <|end|> is no control token here
    assert (generation.bos_token_id, generation.pad_token_id) == (1, None)
    assert (generation.do_sample, generation.temperature, generation.top_k) == (True, 0.5, 20)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from kvjax.models.gguf import file

    path = RawFile().write(tmp_path / "x.gguf")
    file._package.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        CheckpointError, match=r"needs the package gguf: pip install 'kvjax\[gguf\]'"
    ):
        models.load(path)
