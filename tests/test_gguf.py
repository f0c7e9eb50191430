"""Models in GGUF files: every architecture and block type, shards, and damaged files."""

import struct
import tracemalloc
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
from kvjax.models.gguf import find_gguf, read_generation, read_gguf  # noqa: E402
from kvjax.models.weights import flatten  # noqa: E402
from tests.gguf_files import (  # noqa: E402
    ARRAY,
    F32,
    FLOAT32,
    MODELS,
    Q8_0,
    STRING,
    UINT32,
    RawFile,
    text,
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


def valid() -> RawFile:
    """A small valid file with every kind of entry."""
    tokens = struct.pack("<IQ", STRING, 3) + text("a") + text("bc") + text("d")
    return (
        RawFile(data=bytes(range(200)) + bytes(88))
        .entry("general.architecture", STRING, text("llama"))
        .entry("llama.block_count", UINT32, struct.pack("<I", 2))
        .entry("llama.rope.freq_base", FLOAT32, struct.pack("<f", 1e4))
        .entry("tokenizer.ggml.tokens", ARRAY, tokens)
        .entry("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ3f", FLOAT32, 3, 1, 2, 3))
        .entry("flag", 7, b"\1")
        .tensor("first", (4, 8), F32, 0)
        .tensor("second", (32, 3), Q8_0, 128)
    )


def damaged() -> dict[str, RawFile | int]:
    """Files with one wrong field each; a number is the byte at which the valid file is cut."""
    huge = (2**64 - 1, 2**63, 2**62, 2**48, 2**40, 10**9, 10**6)
    files: dict[str, RawFile | int] = {}

    def add(name: str, file: RawFile) -> None:
        assert name not in files
        files[name] = file

    for magic in (b"GGUE", b"FUGG", b"\0\0\0\0", b"PK\3\4", b'{"a"'):
        file = valid()
        file.magic = magic
        add(f"magic {magic!r}", file)
    for version in (0, 1, 4, 2**24 * 3, 2**32 - 1):
        file = valid()
        file.version = version
        add(f"version {version}", file)
    for n in huge:
        for place in (0, 1):
            file = valid()
            file.counts = (n, None) if place == 0 else (None, n)
            add(f"{('tensors', 'entries')[place]} {n}", file)
        add(f"key of {n} bytes", valid_plus(struct.pack("<Q", n) + b"key" + bytes(12)))
        string = text("key") + struct.pack("<IQ", STRING, n) + b"abc"
        add(f"string of {n} bytes", valid_plus(string))
        for kind in (STRING, FLOAT32, 0, 12):
            array = text("key") + struct.pack("<IIQ", ARRAY, kind, n) + bytes(24)
            add(f"array of {n} of type {kind}", valid_plus(array))
        add(f"offset {n}", valid().tensor("third", (1,), F32, n // 32 * 32))
        add(f"row of {n}", valid().tensor("third", (n // 32 * 32,), Q8_0, 256))
        add(f"rows of {n}", valid().tensor("third", (1, n, n, n), F32, 256))
    for kind in (13, 14, 100, 2**31):
        add(f"value of type {kind}", valid_plus(text("key") + struct.pack("<I", kind) + bytes(8)))
        add(
            f"array of type {kind}",
            valid_plus(text("key") + struct.pack("<IIQ", ARRAY, kind, 1) + bytes(8)),
        )
        add(f"tensor of type {kind + 200}", valid().tensor("third", (1,), kind + 200, 256))
    nested = text("key") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + struct.pack("<IQ", 0, 0)
    add("array of arrays", valid_plus(nested))
    add("boolean 2", valid_plus(text("key") + struct.pack("<I", 7) + b"\2"))
    add("key twice", valid_plus(text("flag") + struct.pack("<I", 7) + b"\1"))
    add("key not UTF-8", valid_plus(text(b"\xff\xfe") + struct.pack("<I", 7) + b"\1"))
    add("string not UTF-8", valid_plus(text("key") + struct.pack("<I", STRING) + text(b"\xc3")))
    add("tensor twice", valid().tensor("first", (4,), F32, 256))
    for dimensions in (0, 5, 2**16, 2**31):
        file = valid()
        file.tensors.append(("third", (1,) * min(dimensions, 5), F32, 256))
        if dimensions > 5:
            raw = text("third") + struct.pack("<I", dimensions)
            file = valid_plus(raw, tensors=True)
        add(f"{dimensions} dimensions", file)
    add("size 0", valid().tensor("third", (0,), F32, 256))
    add("size 0 of 2", valid().tensor("third", (4, 0), F32, 256))
    add("a part of a block", valid().tensor("third", (33,), Q8_0, 256))
    for offset in (1, 4, 31, 33, 130):
        add(f"offset {offset}", valid().tensor("third", (1,), F32, offset))
    for offset in (0, 32, 96, 128, 160, 224):
        add(f"overlap at {offset}", valid().tensor("third", (8,), F32, offset))
    add("past the end", valid().tensor("third", (9,), F32, 256))
    for alignment in (0, 3, 24, 2**31 + 1):
        value = struct.pack("<I", alignment)
        add(f"alignment {alignment}", valid().entry("general.alignment", UINT32, value))
    add("alignment text", valid().entry("general.alignment", STRING, text("32")))
    return files


def valid_plus(raw: bytes, *, tensors: bool = False) -> RawFile:
    """The valid file with one more entry, or tensor, of these bytes."""
    file = valid()
    if tensors:
        file.counts = (3, None)
        # Written after the last tensor, in place of the padding and the data.
        file.data, file.tensors = raw, [*file.tensors]
    else:
        file.entries.append(raw)
    return file


CUTS = 110
"""Before the end of the last tensor, which is 58 bytes before the end of the file."""


def test_the_valid_file(tmp_path: Path) -> None:
    read = read_gguf(valid().write(tmp_path / "x.gguf"))
    assert read.metadata["tokenizer.ggml.tokens"] == ["a", "bc", "d"]
    assert [tensor.shape for tensor in read.tensors.values()] == [(8, 4), (3, 32)]
    assert read.tensors["first"].read().tobytes() == bytes(range(128))


def test_damaged_files(tmp_path: Path) -> None:
    """200 damaged files: each gives one clear sentence with the file's name, and nothing of the
    size that it claims is allocated."""
    file = tmp_path / "x.gguf"
    whole = valid().write(file).read_bytes()
    files: dict[str, bytes] = {}
    for name, each in damaged().items():
        files[name] = each.write(file).read_bytes() if isinstance(each, RawFile) else b""
    for cut in np.linspace(0, len(whole) - 59, CUTS).astype(int):
        files[f"cut at {cut}"] = whole[:cut]
    assert len(files) >= 200
    messages = {}
    for name, raw in files.items():
        file.write_bytes(raw)
        tracemalloc.start()
        with pytest.raises(CheckpointError) as caught:
            read_gguf(file)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        messages[name] = str(caught.value)
        assert peak < 2**20, f"{name}: {peak:,} bytes"
        assert messages[name].startswith(f"{file}: ") and "\n" not in messages[name], name
    for name, part in {
        "magic b'PK\\x03\\x04'": "not a GGUF file: it begins with b'PK",
        f"version {2**24 * 3}": "a GGUF file of big-endian; expected version 2 or 3",
        "array of arrays": "key is an array of arrays; expected strings or numbers",
        "tensor twice": "the tensor first occurs twice",
        "overlap at 32": "the tensors first and third overlap",
        "offset 33": "the tensor third has the offset 33, which is not a multiple of",
        "a part of a block": "the tensor third has rows of 33 values, which do not fill blocks of",
        "past the end": "truncated or damaged: the tensor third ends at byte",
        f"tensors {2**40}": f"the number of tensors is {2**40:,}, and the file has",
    }.items():
        assert part in messages[name], messages[name]


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes(seed: int, tmp_path: Path) -> None:
    """Any change of a byte either gives a file that can be read, or a ``CheckpointError``."""
    rng, file = np.random.default_rng(seed), tmp_path / "x.gguf"
    whole = valid().write(file).read_bytes()
    refused = 0
    for _ in range(200):
        changed = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            changed[int(rng.integers(len(whole) - 280))] = int(rng.integers(256))
        file.write_bytes(bytes(changed))
        try:
            read_gguf(file)
        except CheckpointError as error:
            refused += 1
            assert str(error).startswith(str(file))
    assert refused > 50


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
        r"rope\.scaling\.type is 'longrope'; expected none, linear or yarn: there is no tensor",
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
    original = models.loading.gguf.read_gguf

    def changed(path: Path) -> Any:
        read = original(path)
        arrays = {k: np.array(v) if isinstance(v, list) else v for k, v in entries.items()}
        return type(read)(read.path, {**read.metadata, **arrays}, read.tensors)

    monkeypatch.setattr(models.loading.gguf, "read_gguf", changed)
    with pytest.raises(CheckpointError, match=message) as caught:
        models.load(file)
    assert str(file) in str(caught.value)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
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
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(8, np.float32)
    with pytest.raises((CheckpointError, KeyError, ValueError)):
        write()
        models.load(file)


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

    path = valid().write(tmp_path / "x.gguf")
    file._package.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        CheckpointError, match=r"needs the package gguf: pip install 'kvjax\[gguf\]'"
    ):
        models.load(path)
