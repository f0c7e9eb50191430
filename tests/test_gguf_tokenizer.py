"""Tokenizers from GGUF metadata: the same ids as the tokenizer that was converted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

import kvjax
from kvjax.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from kvjax.models.gguf.tokenizer import gguf_tokenizer
from kvjax.models.text import Tokenizer
from tests import gguf_tokenizers as gguf

FILE = Path("model.gguf")
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    tokenizer = gguf_tokenizer(FILE, metadata)
    assert tokenizer is not None
    return tokenizer


def sequence(*steps: Any, byte_level: bool = True) -> Any:
    """Splits by regexes, then the byte alphabet."""
    splits = [
        pre_tokenizers.Split(Regex(s), "isolated") if isinstance(s, str) else s for s in steps
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence(splits + [last] * byte_level)


def byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# As the models' own tokenizer.json files have them.
# fmt: off
FAMILIES: dict[str, Any] = {
    "gpt-2": byte_level,
    "smollm": lambda: sequence(pre_tokenizers.Digits(True), byte_level(), byte_level=False),
    "falcon": lambda: sequence(
        pre_tokenizers.Punctuation("contiguous"), byte_level(), pre_tokenizers.Digits(False),
        "[0-9][0-9][0-9]", byte_level=False),
    "llama-bpe": lambda: sequence(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "qwen2": lambda: sequence(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "qwen35": lambda: sequence(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "deepseek-coder": lambda: sequence(
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", pre_tokenizers.Digits(True)),
    "deepseek-v3": lambda: sequence(
        r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "tekken": lambda: sequence(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "gpt-4o": lambda: sequence(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "seed-coder": lambda: sequence(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "bloom": lambda: sequence(r" ?[^(\s|.,!?…。，、।۔،)]+"),
    "superbpe": lambda: sequence(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
}
# fmt: on


@pytest.mark.slow(but=("smollm", "llama-bpe"))
@pytest.mark.parametrize("pre", FAMILIES)
def test_byte_level_bpe(pre: str) -> None:
    source = gguf.train_bpe(FAMILIES[pre]())
    if PRE_TOKENIZERS[pre].ignore_merges:
        source.model.ignore_merges = True
    tokenizer = tokenizer_of(gguf.bpe_metadata(source, pre))
    texts = gguf.texts()
    ids = [encoding.ids for encoding in source.encode_batch(texts)]
    assert [tokenizer.encode(text) for text in texts] == ids
    assert [tokenizer.decode(i, skip_special_tokens=False) for i in ids] == texts


def test_every_pre_tokenizer_loses_nothing() -> None:
    metadata = gguf.bpe_metadata(gguf.train_bpe(byte_level()), "gpt-2")
    texts = gguf.texts(100)
    seen = set()
    for name, pre in PRE_TOKENIZERS.items():
        if pre in seen or not pre.byte_level:
            continue
        seen.add(pre)
        tokenizer = tokenizer_of({**metadata, "tokenizer.ggml.pre": name})
        for text in texts:
            assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text, name
    assert len(seen) > 25


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("default", "ab1234!?  c", ["ab", "123", "4", "!?", " ", " c"]),
        ("falcon", "a`1234", ["a", "`", "123", "4"]),
        ("gpt-2", "I'M 12ab", ["I", "'", "M", " 12", "ab"]),
        ("smollm", "x 12", ["x", " ", "1", "2"]),
        ("llama-bpe", "I'M 1234\n\n x", ["I", "'M", " ", "123", "4", "\n\n", " x"]),
        ("qwen2", "12.x", ["1", "2", ".x"]),
        ("qwen35", "xe\u0301 1", ["xe\u0301", " ", "1"]),
        ("tekken", "fooBar12/\n", ["foo", "Bar", "1", "2", "/\n"]),
        ("gpt-4o", "fooBar's 1234", ["foo", "Bar's", " ", "123", "4"]),
        ("kimi-k2", "ab漢字c's 1234", ["ab", "漢字", "c's", " ", "123", "4"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("superbpe", "a b 12345", ["a b ", "12", "345"]),
        ("viking", "a,b 12", ["a", ",", "b", " ", "1", "2"]),
        ("exaone-moe", "a b 12", ["a b", " ", "1", "2"]),
        ("jais-2", "a" + " " * 11 + "b", ["a", " " * 8, "  ", " b"]),
        ("deepseek-llm", "a\n漢12, ", ["a", "\n", "漢", "12", ",", " "]),
        ("deepseek-coder", "a b12.c", ["a", " b", "1", "2", ".", "c"]),
        ("youtu", "한국a漢1", ["한국", "a", "漢", "1"]),
        ("chameleon", "IMGIMGABZ\t1a", ["IMGIMGABZ", "\t", "1", "a"]),
        ("laguna", "a \n b", ["a", " ", "\n", " b"]),
        ("minicpm5", "1234", ["123", "4"]),
    ],
)
def test_words(pre: str, text: str, words: list[str]) -> None:
    """How each pre-tokenizer splits, by hand."""
    metadata = {**TINY, "tokenizer.ggml.pre": pre}
    backend = tokenizer_of(metadata).backend
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[slice(*span)] for span in spans] == words


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TINY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*ALPHABET, "ab", "bc", "abc", "<s>", "</s>", "<mark>"],
    "tokenizer.ggml.token_type": [1] * 259 + [3, 3, 4],
    "tokenizer.ggml.merges": ["b c", "a b", "a bc", "b c"],
    "tokenizer.ggml.bos_token_id": 259,
    "tokenizer.ggml.eos_token_id": 260,
}


def test_ignored_merges() -> None:
    """``cab`` has no merge, but is a token: only some models take it for a whole word."""
    tokens = [*TINY["tokenizer.ggml.tokens"], "cab"]
    metadata = {**TINY, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 263}
    for pre, whole in [("gpt-2", False), ("llama-bpe", True), ("dbrx", False), ("tekken", True)]:
        tokenizer = tokenizer_of({**metadata, "tokenizer.ggml.pre": pre})
        assert (tokenizer.encode("cab", add_special_tokens=False) == [262]) == whole


def test_merges_in_their_order() -> None:
    """The first of equal merges counts."""
    tokenizer = tokenizer_of(TINY)
    tokens = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("abc abd")]
    assert tokens == ["abc", "Ġ", "ab", "d"]


def test_types_of_tokens() -> None:
    tokenizer = tokenizer_of(TINY)
    ids = tokenizer.encode("a<s><mark></s>")
    assert ids[1:] == [259, 261, 260]
    assert tokenizer.decode(ids) == "a<mark>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<s><mark></s>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (259, 260)
    assert tokenizer.pad_token_id is None
    assert tokenizer.vocab_size == 262


def test_tokens_that_look_like_bytes() -> None:
    """``À`` is a letter where it is a token of its own, and the byte C0 in a word."""
    tokens = [*TINY["tokenizer.ggml.tokens"], "<Àé>", "é"]
    tokens[tokens.index("é")] = "[no byte]"
    types = [*TINY["tokenizer.ggml.token_type"], 4, 4]
    merges = ["à ¤"]
    metadata = {**TINY, "tokenizer.ggml.tokens": [*tokens, "à¤"], "tokenizer.ggml.merges": merges}
    tokenizer = tokenizer_of({**metadata, "tokenizer.ggml.token_type": [*types, 1]})
    text = "aé<Àé>हà"
    ids = tokenizer.encode(text)
    assert ids[1:3] == [263, 262] and ids[3] == 264
    assert tokenizer.decode(ids) == text


def test_types_of_older_files() -> None:
    """Without types, the tokens that have a role are still found in a text."""
    tokens = [*TINY["tokenizer.ggml.tokens"][:-1], "<|im_end|>"]
    metadata = {**TINY, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.unknown_token_id": 0}
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.encode("<s>!<|im_end|></s>") == [259, ALPHABET.index("!"), 261, 260]
    assert tokenizer.decode([259, ALPHABET.index("!"), 261]) == "!"
    assert tokenizer.special_tokens["unk_token"] == ALPHABET[0]


def test_tokens_without_text() -> None:
    tokens = ["", *TINY["tokenizer.ggml.tokens"][1:]]
    tokenizer = tokenizer_of({**TINY, "tokenizer.ggml.tokens": tokens})
    assert tokenizer.backend.id_to_token(0) == "[EMPTY_0]"


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({}, False, False),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True, False),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False, False),
        ({"tokenizer.ggml.add_bos_token": True}, True, False),
        ({"tokenizer.ggml.add_eos_token": True}, False, True),
        ({"tokenizer.ggml.pre": "gemma4", "tokenizer.ggml.add_bos_token": False}, True, False),
        ({"tokenizer.ggml.pre": "tekken", "tokenizer.ggml.bos_token_id": 2**32 - 1}, False, False),
    ],
)
def test_bos_and_eos(changes: dict[str, Any], first: bool, last: bool) -> None:
    tokenizer = tokenizer_of({**TINY, **changes})
    a = ALPHABET.index("a")
    assert tokenizer.encode("a") == [259] * first + [a] + [260] * last
    assert tokenizer.encode("") == [259] * first + [260] * last


def test_all_special_tokens() -> None:
    names = ("bos", "eos", "unknown", "seperator", "padding", "cls", "mask")
    ids = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(names)}
    special = tokenizer_of({**TINY, **ids}).special_tokens
    named = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    assert special == {f"{name}_token": ALPHABET[i] for i, name in enumerate(named)}


def test_phi3_strips_after_special_tokens() -> None:
    """Its files do not say so: llama.cpp goes by the model's name."""
    plain = tokenizer_of({**TINY, "general.name": "Other"})
    phi = tokenizer_of({**TINY, "general.name": "Phi-3 mini"})
    text = "<mark> \na<s> a</s> a"
    a, gap, line = (ALPHABET.index(c) for c in "aĠĊ")
    assert plain.encode(text) == [261, gap, line, a, 259, gap, a, 260, gap, a]
    assert phi.encode(text) == [261, a, 259, gap, a, 260, a]


def test_chat_templates() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    metadata = {
        **TINY,
        "tokenizer.chat_template": template,
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ tools[0] }}<mark>",
    }
    tokenizer = tokenizer_of(metadata)
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.render(messages) == "<s>ab</s>"
    assert tokenizer.chat(messages) == [259, 256, 260]
    assert tokenizer.render(messages, tools=["x"]) == "x<mark>"
    assert not tokenizer_of(TINY).templates
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer_of(TINY).render(messages)


def test_no_tokenizer() -> None:
    for metadata in ({}, {"tokenizer.ggml.model": "none"}, {"tokenizer.ggml.model": "no_vocab"}):
        assert gguf_tokenizer(FILE, metadata) is None


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe(prefix: bool) -> None:
    metadata = gguf.sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": prefix})
    tokenizer, reference = tokenizer_of(metadata), gguf.Reference(metadata)
    for text in gguf.texts(600):
        ids = tokenizer.encode(text)
        assert ids == [1, *reference.encode(text)], text
        decoded = tokenizer.decode(ids[1:], skip_special_tokens=False)
        # The text after a special token gets a space too.
        if not prefix or not any(token in text for token in reference.special):
            assert decoded == text.replace("▁", " "), text


@pytest.mark.slow
def test_sentencepiece_bpe_of_all_texts() -> None:
    metadata = gguf.sentencepiece_metadata(2000)
    tokenizer, reference = tokenizer_of(metadata), gguf.Reference(metadata)
    for text in gguf.texts():
        assert tokenizer.encode(text)[1:] == reference.encode(text), text


def test_sentencepiece_without_scores_goes_by_ids() -> None:
    """Converters that know no scores write the same for all; ids are in the order of merges."""
    metadata = gguf.sentencepiece_metadata()
    flat = {**metadata, "tokenizer.ggml.scores": [-1000.0] * len(metadata["tokenizer.ggml.tokens"])}
    expected, tokenizer = tokenizer_of(metadata), tokenizer_of(flat)
    for text in gguf.texts(300):
        assert tokenizer.encode(text) == expected.encode(text)


def test_plain_text_bpe() -> None:
    """Gemma 4: the merges of the file, ▁ for spaces and bytes for other characters."""
    merged, _ = gguf.trained_pieces(700)
    metadata = gguf.sentencepiece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = []
    for piece in [t for t in tokens if t in set(merged)]:
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        merges += [" ".join(pair) for pair in pairs if pair[0] in tokens and pair[1] in tokens]
    metadata |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
    tokenizer = tokenizer_of(metadata)
    same = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": False}
    reference = gguf.Reference({**metadata, **same})
    for text in gguf.texts(300):
        ids = tokenizer.encode(text)
        assert ids == [1, *reference.encode(text)], text
        assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text.replace("▁", " ")


@pytest.mark.parametrize("merge_spaces", [True, False])
def test_unigram(merge_spaces: bool) -> None:
    metadata = gguf.unigram_metadata(**{"tokenizer.ggml.remove_extra_whitespaces": merge_spaces})
    tokenizer, reference = tokenizer_of(metadata), gguf.Reference(metadata)
    for text in gguf.texts(400):
        assert tokenizer.encode(text) == [*reference.encode(text), 1], text
    decoded = tokenizer.decode(tokenizer.encode(" the  cache <tool>x"))
    assert decoded == ("the cache<tool> x" if merge_spaces else " the  cache <tool> x")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_character_map(dtype: Any) -> None:
    key = "tokenizer.ggml.precompiled_charsmap"
    tokenizer = tokenizer_of(gguf.unigram_metadata(**{key: gguf.charsmap().view(dtype)}))
    text = "the\tWork\n\n a\n"
    assert tokenizer.encode(text) == tokenizer.encode("the Work a")
    assert tokenizer.decode(tokenizer.encode(text)) == "the Work a"


@pytest.mark.parametrize(
    "damaged",
    [
        np.arange(3),
        gguf.charsmap()[:1000],
        gguf.charsmap()[4:],
        gguf.charsmap(b"\xff\0"),
        gguf.charsmap(b""),
        gguf.charsmap(u0=1 << 20),
        gguf.charsmap(u25=1 << 25 | 9),
        gguf.charsmap(u29=1 << 31 | 7),
        gguf.charsmap("é\0".encode(), u29=1 << 31 | 1),
    ],
)
def test_damaged_character_maps(damaged: np.ndarray) -> None:
    key = "tokenizer.ggml.precompiled_charsmap"
    with pytest.raises(kvjax.CheckpointError, match=f"{key} is damaged; expected a map"):
        gguf_tokenizer(FILE, gguf.unigram_metadata(**{key: damaged}))


def test_unigram_with_bytes() -> None:
    metadata = gguf.unigram_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"], *(f"<0x{i:02X}>" for i in range(256))]
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*metadata["tokenizer.ggml.scores"], *[0.0] * 256],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], *[6] * 256],
    }
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.decode(tokenizer.encode("the 漢字 😀")) == "the 漢字 😀"


def test_numpy_arrays() -> None:
    metadata = gguf.sentencepiece_metadata()
    arrays = {
        "tokenizer.ggml.scores": np.float32(metadata["tokenizer.ggml.scores"]),
        "tokenizer.ggml.token_type": np.int32(metadata["tokenizer.ggml.token_type"]),
    }
    text = "the cache <tool>\n  漢"
    expected = tokenizer_of(metadata).encode(text)
    assert tokenizer_of({**metadata, **arrays}).encode(text) == expected


LLAMA = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1],
}


@pytest.mark.parametrize(
    ("base", "key", "value", "message"),
    [
        (TINY, "model", "bert", "expected one of gemma4, gpt2, llama, t5"),
        (TINY, "model", 3, 'tokenizer.ggml.model is 3; expected one of'),
        (TINY, "pre", "afmoe", 'pre is "afmoe"; expected one of a.x-4.0, bailingmoe'),
        (TINY, "pre", 7, "pre is 7; expected one of"),
        (TINY, "tokens", None, "tokens is null; expected a list of strings"),
        (TINY, "tokens", [], "tokens is .*; expected at least one token"),
        (TINY, "tokens", ["a", 1], r'tokens is \["a", 1\]; expected a list of strings'),
        (TINY, "tokens", ["a", "b", "a"], "has the token 'a' twice, at 0 and 2; expected"),
        (TINY, "token_type", [1, 2], "has 2 entries; expected 262, the number of tokens in"),
        (TINY, "token_type", "x", 'token_type is "x"; expected a list of integers'),
        (TINY, "token_type", [1.5] * 262, "token_type is .*; expected a list of integers"),
        (TINY, "merges", None, "merges is null; expected a list of strings"),
        (TINY, "merges", ["a b", "ab"], "has 'ab' as entry 1; expected two tokens separated by a"),
        (TINY, "merges", ["a b c"], "has 'a b c' as entry 0; expected two tokens"),
        (TINY, "merges", ["a d"], "has 'a d' as entry 0; .*, which join to a token"),
        (TINY, "bos_token_id", 262, "bos_token_id is 262; expected the id of one of the 262"),
        (TINY, "eos_token_id", "x", 'eos_token_id is "x"; expected the id of one of'),
        (TINY, "padding_token_id", True, "padding_token_id is true; expected the id"),
        (TINY, "add_bos_token", 1, "add_bos_token is 1; expected true or false"),
        (LLAMA, "scores", None, "scores is null; expected a list of finite numbers"),
        (LLAMA, "scores", [0.0], "scores has 1 entries; expected 4, the number of tokens in"),
        (LLAMA, "scores", [0.0, 0, 0, float("nan")], "expected a list of finite numbers"),
        (LLAMA, "scores", [[0.0], [1, 2]], "expected a list of finite numbers"),
        (LLAMA, "add_space_prefix", "yes", 'add_space_prefix is "yes"; expected true or false'),
        ({**LLAMA, "tokenizer.ggml.model": "t5"}, "scores", None, "expected a list of finite"),
    ],
)  # fmt: skip
def test_refusals(base: dict[str, Any], key: str, value: object, message: str) -> None:
    metadata = {**base, f"tokenizer.ggml.{key}": value}
    with pytest.raises(kvjax.CheckpointError, match=message) as caught:
        gguf_tokenizer(FILE, metadata)
    assert str(caught.value).startswith(f"model.gguf: tokenizer.ggml.{key} ")


def test_more_refusals() -> None:
    without = {key: value for key, value in TINY.items() if "bos" not in key}
    with pytest.raises(kvjax.CheckpointError, match="add_bos_token is true; expected false"):
        gguf_tokenizer(FILE, {**without, "tokenizer.ggml.add_bos_token": True})
    with pytest.raises(kvjax.CheckpointError, match=r"chat_template.rag is 3; expected a string"):
        gguf_tokenizer(FILE, {**TINY, "tokenizer.chat_template.rag": 3})
    short = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<pad>", "</s>"],
        "tokenizer.ggml.scores": [0.0, 0.0],
    }
    with pytest.raises(kvjax.CheckpointError, match="expected the id of the unknown token"):
        gguf_tokenizer(FILE, short)
