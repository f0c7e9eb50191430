"""Make a tokenizer from the metadata of a GGUF file.

The conventions are llama.cpp's: the kinds of tokens, the defaults of each tokenizer model, and
what the name of a pre-tokenizer implies.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvjax.core.validation import CheckpointError, short_repr
from kvjax.models.chat import ChatTemplates
from kvjax.models.files import Fields
from kvjax.models.text import Tokenizer

from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_MODEL = "tokenizer.ggml.model"
_PRE = "tokenizer.ggml.pre"
_TOKENS = "tokenizer.ggml.tokens"
_SCORES = "tokenizer.ggml.scores"
_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"
_SUPPORTED = ("gemma4", "gpt2", "llama", "t5")
_NO_TOKEN = 2**32 - 1
"""-1 as uint32, which some files store for a token that they do not have."""
_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # the format's spelling
    "pad_token": "tokenizer.ggml.padding_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
_DEFAULT_IDS = {
    "llama": {"bos_token": 1, "eos_token": 2, "unk_token": 0},
    "t5": {"eos_token": 1, "unk_token": 2, "pad_token": 0},
}
_CONTROL_TEXTS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
    *("<|calls|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>"),
    *("<turn|>", "<｜end▁of▁sentence｜>"),
}
"""Tokens that end a turn or a text. Some files give them the type of words."""


def gguf_tokenizer(file: Path, metadata: Mapping[str, object]) -> Tokenizer | None:
    """Make the tokenizer that a GGUF file's metadata describes.

    Args:
      file: the GGUF file, for error messages.
      metadata: the file's keys with their values: strings, numbers, bools, and lists or NumPy
        arrays of those.

    Returns:
      The tokenizer, or None if ``tokenizer.ggml.model`` is missing, ``none`` or ``no_vocab``.

    Raises:
      CheckpointError: if a key is missing or has an invalid value, or if the kind of tokenizer is
        not supported. The message names the key, its value and what is expected.
    """
    fields = Fields(file, metadata)
    model = fields.raw(_MODEL)
    if model in (None, "none", "no_vocab"):
        return None
    if model not in _SUPPORTED:
        raise fields.wrong(_MODEL, f"one of {', '.join(_SUPPORTED)}")
    vocabulary = _read_vocabulary(fields)
    special_ids = _read_special_ids(fields, vocabulary, _DEFAULT_IDS.get(model, {}))
    add_bos, add_eos = model == "llama", model == "t5"
    if model == "llama":
        backend = _sentencepiece_bpe(fields, vocabulary, special_ids.get("unk_token"))
    elif model == "t5":
        backend = _unigram(fields, vocabulary, special_ids)
    else:
        pre = _read_pre_tokenizer(fields, model)
        backend = _bpe(fields, vocabulary, pre)
        add_bos = pre.add_bos
    backend.add_tokens(list(_added_tokens(fields, vocabulary, model, special_ids)))
    special = {name: vocabulary.tokens[token] for name, token in special_ids.items()}
    return Tokenizer(
        backend,
        special_tokens=special,
        add_bos_token=_adds(fields, "bos", special, add_bos),
        add_eos_token=_adds(fields, "eos", special, add_eos),
        templates=ChatTemplates(_read_templates(fields), special, str(file)),
    )


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens with their types, and their ids by text."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]


def _wrong(fields: Fields, name: str, found: str, expected: str) -> CheckpointError:
    """The error for a value that is too long to quote."""
    return CheckpointError(f"{fields.file}: {name} {found}; expected {expected}")


def _read_strings(fields: Fields, name: str) -> list[str]:
    value = fields.raw(name)
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise fields.wrong(name, "a list of strings")
    return value


def _read_numbers(fields: Fields, name: str, kinds: str, count: int | None = None) -> np.ndarray:
    """A list of numbers whose NumPy kinds are among ``kinds``, one for each of ``count`` tokens."""
    expected = "integers" if "f" not in kinds else "finite numbers"
    value = fields.raw(name)
    if not isinstance(value, list | np.ndarray):
        raise fields.wrong(name, f"a list of {expected}")
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.empty((0, 0))
    if array.size and (array.dtype.kind not in kinds or not np.isfinite(array).all()):
        raise fields.wrong(name, f"a list of {expected}")
    if array.ndim != 1:
        raise fields.wrong(name, f"a list of {expected}")
    if count is not None and len(array) != count:
        found = f"has {len(array)} entries"
        raise _wrong(fields, name, found, f"{count}, the number of tokens in {_TOKENS}")
    return array


def _read_vocabulary(fields: Fields) -> _Vocabulary:
    texts = _read_strings(fields, _TOKENS)
    if not texts:
        raise fields.wrong(_TOKENS, "at least one token")
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) < len(tokens):
        first, second = next((i, ids[text]) for i, text in enumerate(tokens) if ids[text] != i)
        found = f"has the token {short_repr(tokens[first])} twice, at {first} and {second}"
        raise _wrong(fields, _TOKENS, found, "different tokens")
    types = [_NORMAL] * len(tokens)
    if fields.raw(_TYPES) is not None:
        types = _read_numbers(fields, _TYPES, "iu", len(tokens)).tolist()
    for text in _CONTROL_TEXTS & ids.keys():
        if types[ids[text]] == _NORMAL:
            types[ids[text]] = _CONTROL
    return _Vocabulary(tokens, types, ids)


def _read_special_ids(
    fields: Fields, vocabulary: _Vocabulary, defaults: Mapping[str, int]
) -> dict[str, int]:
    """The ids of the special tokens that the file names, and llama.cpp's defaults."""
    count = len(vocabulary.tokens)
    result = {name: token for name, token in defaults.items() if token < count}
    for name, key in _SPECIAL_TOKENS.items():
        token = fields.raw(key)
        if token is None or token == _NO_TOKEN:
            continue
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < count:
            raise fields.wrong(key, f"the id of one of the {count} tokens")
        result[name] = token
    return result


def _adds(fields: Fields, which: str, special: Mapping[str, str], default: bool) -> bool:
    """Whether ``encode`` adds BOS (``which`` is "bos") or EOS."""
    key, exists = f"tokenizer.ggml.add_{which}_token", f"{which}_token" in special
    if fields.flag(key, False) and not exists:
        raise fields.wrong(key, f"false without tokenizer.ggml.{which}_token_id")
    if which == "bos" and "gemma4" in (fields.raw(_MODEL), fields.raw(_PRE)):
        return exists  # llama.cpp overrides the flag: the models need the token
    return fields.flag(key, default) and exists


def _read_templates(fields: Fields) -> dict[str, str]:
    """The chat templates by name. The key of the default one has no name."""
    names = {key: key.removeprefix(_TEMPLATE + ".") for key in fields.values}
    names = {key: name for key, name in names.items() if name != key and name}
    if fields.raw(_TEMPLATE) is not None:
        names[_TEMPLATE] = "default"
    for key in names:
        if not isinstance(fields.raw(key), str):
            raise fields.wrong(key, "a string")
    return {name: str(fields.raw(key)) for key, name in names.items()}


def _added_tokens(
    fields: Fields, vocabulary: _Vocabulary, model: str, special_ids: Mapping[str, int]
) -> Iterable[AddedToken]:
    """The tokens that are found in a text before anything else is done with it."""
    # The unknown token of a file of byte-level BPE is often just its first token.
    names = ("bos_token", "eos_token", *(("unk_token",) if model in _DEFAULT_IDS else ()))
    named = {special_ids[name] for name in names if name in special_ids}
    # Of Phi-3, and of no other model, the file says too little.
    general_name = str(fields.raw("general.name", "")).lower()
    strips = "phi-3" in general_name or "phi3" in general_name
    for token, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        special = kind in (_CONTROL, _UNKNOWN) or token in named
        if special or kind == _USER_DEFINED:
            rstrip = strips and text not in ("<unk>", "<s>", "<|endoftext|>")
            yield AddedToken(text, special=special, normalized=False, rstrip=rstrip)


def _read_pre_tokenizer(fields: Fields, model: str) -> PreTokenizer:
    if model == "gemma4":
        return PRE_TOKENIZERS["gemma4"]
    name = fields.raw(_PRE, "default") or "default"
    if name not in PRE_TOKENIZERS:
        raise fields.wrong(_PRE, f"one of {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]


def _bpe(fields: Fields, vocabulary: _Vocabulary, pre: PreTokenizer) -> Backend:
    """BPE with the merges of the file."""
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_read_merges(fields, vocabulary.ids),
        ignore_merges=pre.ignore_merges,
        byte_fallback=not pre.byte_level,
    )
    backend = Backend(model)
    steps: list[pre_tokenizers.PreTokenizer]
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    if pre.byte_level:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        backend.decoder = _byte_decoder(vocabulary)
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.decoder = _sentencepiece_decoder(strip=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return backend


def _byte_decoder(vocabulary: _Vocabulary) -> decoders.Decoder:
    """The bytes of words, but the text of other tokens: DeepSeek's ``À`` is not the byte C0."""
    alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet())
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps: list[decoders.Decoder] = []
    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED) and not text.isascii() and alphabet.issuperset(text):
            spelled = "".join(word for word, _ in spelling.pre_tokenize_str(text))
            steps.append(decoders.Replace(Regex(rf"\A{re.escape(text)}\z"), spelled))
    return decoders.Sequence([*steps, decoders.ByteLevel()]) if steps else decoders.ByteLevel()


def _read_merges(fields: Fields, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: dict[tuple[str, str], None] = {}
    for index, merge in enumerate(_read_strings(fields, _MERGES)):
        end = merge.find(" ", 1)
        left, right = merge[: max(end, 0)], merge[end + 1 :]
        if left not in ids or right not in ids or left + right not in ids:
            found = f"has {short_repr(merge)} as entry {index}"
            raise _wrong(
                fields, _MERGES, found, "two tokens separated by a space, which join to a token"
            )
        merges[left, right] = None  # the first of equal merges counts
    return list(merges)


def _sentencepiece_decoder(*, strip: bool) -> decoders.Decoder:
    """``strip``: remove the space that was added at the start of a text."""
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


def _sentencepiece_bpe(fields: Fields, vocabulary: _Vocabulary, unknown: int | None) -> Backend:
    """BPE whose merges follow from the scores: of all adjacent pairs that join to a token, the one
    whose token has the highest score is merged first."""
    scores = _read_numbers(fields, _SCORES, "fiu", len(vocabulary.tokens)).tolist()
    found = (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
    words = {
        text: i
        for text, i in vocabulary.ids.items()
        if vocabulary.types[i] not in found and i != unknown
    }
    # Equal scores are in the order of ids: some converters write no scores, and ids follow merges.
    merges = [
        (text[:cut], text[cut:])
        for text in sorted(words, key=lambda text: (-scores[words[text]], words[text]))
        for cut in range(1, len(text))
        if text[:cut] in words and text[cut:] in words
    ]
    backend = Backend(
        models.BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    backend.decoder = _sentencepiece_decoder(strip=prefix)
    return backend


def _unigram(fields: Fields, vocabulary: _Vocabulary, special_ids: Mapping[str, int]) -> Backend:
    """The segmentation into tokens with the highest sum of scores.

    The character map is applied as in ``tokenizer.json`` files. sentencepiece and llama.cpp differ
    from that where several combining marks follow one letter.
    """
    if "unk_token" not in special_ids:
        raise fields.wrong(_SPECIAL_TOKENS["unk_token"], "the id of the unknown token")
    scores = _read_numbers(fields, _SCORES, "fiu", len(vocabulary.tokens))
    normal = np.array(vocabulary.types) == _NORMAL
    # The score of an unknown character is below that of all tokens, but converters give tokens
    # that are not in the model arbitrary low scores.
    least = scores[normal].min() if normal.any() else 0.0
    scores = np.maximum(scores, least).tolist()
    pieces = list(zip(vocabulary.tokens, scores, strict=True))
    backend = Backend(
        models.Unigram(
            pieces, unk_id=special_ids["unk_token"], byte_fallback=_BYTE in vocabulary.types
        )
    )
    steps: list[normalizers.Normalizer] = []
    if fields.raw(_CHARSMAP) is not None:
        steps.append(normalizers.Precompiled(_read_charsmap(fields)))
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", False)
    if fields.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" +"), " "),
        ]
        prefix = True  # as in llama.cpp, each word has its space
    steps += [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    backend.decoder = _sentencepiece_decoder(strip=prefix)
    return backend


def _read_charsmap(fields: Fields) -> bytes:
    """The character map: the size of a trie, the trie, and the replacements.

    The library aborts at texts for which a damaged trie leads out of the map, so it is checked.
    """
    data = _read_numbers(fields, _CHARSMAP, "iu").astype(np.uint8)
    error = _wrong(
        fields, _CHARSMAP, "is damaged", "a map of characters as in sentencepiece models"
    )
    size = int(data[:4].view("<u4")[0]) if len(data) > 4 else 0
    if not 1024 <= size <= len(data) - 4 or size % 1024:
        raise error
    units, replacements = data[4 : 4 + size].view("<u4").astype(np.int64), data[4 + size :]
    try:
        replacements.tobytes().decode()
    except UnicodeDecodeError:
        raise error from None
    labels, values = units & (1 << 31 | 255), units & (1 << 31) - 1
    children = np.arange(len(units)) ^ (units >> 10 << ((units & 1 << 9) >> 6))
    seen = np.zeros(len(units), bool)
    nodes, chars = np.array([0]), np.arange(1, 256)
    while len(nodes):
        seen[nodes] = True
        if (children[nodes] >= len(units)).any():
            raise error
        leaves = values[children[nodes[(units[nodes] & 1 << 8) > 0]]]
        if (leaves >= len(replacements)).any() or (replacements[leaves] & 0xC0 == 0x80).any():
            raise error
        found = children[nodes][:, None] ^ chars
        found = np.unique(found[labels[found] == chars])
        nodes = found[~seen[found]]
    return data.tobytes()
