"""Damaged and hostile GGUF files: one clear sentence each, before anything is allocated."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs the package gguf (the extra `gguf`)")

from kvjax.core.validation import CheckpointError
from kvjax.models.gguf import read_gguf
from tests.gguf_files import (
    ARRAY,
    F32,
    FLOAT32,
    Q8_0,
    STRING,
    UINT32,
    RawFile,
    text,
)


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


UNSAFE = "a\nb\x1b[31mc" + "d" * 40


def test_messages_about_files_are_one_short_line(tmp_path: Path) -> None:
    """Whatever a file has for keys, names and values."""
    file = tmp_path / "x.gguf"
    boolean = struct.pack("<I", 7) + b"\1"
    twice = valid_plus(text(UNSAFE) + boolean)
    twice.entries.append(text(UNSAFE) + boolean)
    raw = {
        "key twice": twice,
        "long key": valid_plus(text("k" * 70_000) + boolean),
        "long name": valid().tensor("n" * 65, (1,), F32, 256),
        "name twice": valid().tensor(UNSAFE, (1,), F32, 256).tensor(UNSAFE, (1,), F32, 256),
        "overlap": valid().tensor(UNSAFE, (8,), F32, 0),
        "alignment": valid().entry("general.alignment", STRING, text("3\n" * 400_000)),
        "split": valid().entry("split.count", STRING, text("3\n" * 400_000)),
    }
    for name, each in raw.items():
        with pytest.raises(CheckpointError) as caught:
            read_gguf(each.write(file))
        assert str(caught.value).isprintable() and len(str(caught.value)) < 400, name
