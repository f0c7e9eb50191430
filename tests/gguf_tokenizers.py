"""Texts, small tokenizers, their GGUF metadata, and llama.cpp's algorithms, slow and plain."""

import functools
import heapq
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[1]
BOS, EOS, TOOL, UNKNOWN = "<s>", "</s>", "<tool>", "<unk>"
NORMAL, UNKNOWN_TYPE, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

EDGES = [
    "",
    *(" ", "  ", "   ", "\n", "\n\n", "\n\n\n\n\n", "\r", "\r\n", "\r\n\r\n", "\t", "\t\t\t", "\v"),
    *("\x00", "\x7f", "\x85", "\xa0", "\xa0\xa0 x", "\u2028\u2029", "\u3000", "\u200b", "\ufeff"),
    *(
        " a",
        "  a",
        "a ",
        "a  ",
        " \n a",
        "a \n",
        "\t a",
        "a\t\tb",
        "a \t b",
        " \r\n x \r\n",
        "\n a",
    ),
    *(
        "1",
        "12",
        "123",
        "1234",
        "12345",
        "1234567",
        " 1",
        "  1",
        "a1",
        "1a",
        "1,234,567.89",
        "3.14",
    ),
    *("1 2  3   4", "٣٤٥٦", "１２３４", "Ⅷ ½ ²³ ①②③", "x12y345z", "2024-11-30T01:23:45"),
    *("I'm you're he'd we'll it's I've don't", "I'M YOU'RE HE'D WE'LL IT'S I'VE DON'T"),
    *("'s 't 'RE 'Ve", "'Sam 'tis ''s", "o'clock O'Neill's", "don’t it’s", "x'ſ", "'sſ'D"),
    *("HelloWorld helloWorld HELLOworld iPhone15Pro", "camelCase snake_case kebab-case", "ÀÉÎ àéî"),
    *("naïve café", "nai\u0308ve cafe\u0301", "e\u0301\u0302\u0303", "\u0301x", "Ωμέγα ΣΊΣΥΦΟΣ ς"),
    *("漢字かな交じり文カタカナ", "你好，世界！", "한국어 텍스트", "ภาษาไทย", "हिन्दी में", "עברית"),
    *("العربية ١٢٣", "ქართული ᲥᲐᲠᲗᲣᲚᲘ", "ǅ ǈ ǋ", "straße STRASSE ẞ", "ﬁ ﬂ ﬀ", "İstanbul ıI"),
    *("😀", "😀😀😀", "👨‍👩‍👧‍👦", "🏳️‍🌈 🇩🇪🇫🇷", "👍🏽 ✊🏿", "a😀b", " 😀 1", "☃️ ✨\n"),
    *(
        "...",
        "!!!",
        "?!?!",
        "-----",
        "=====",
        "______",
        "***",
        "((()))",
        "[[]]{}",
        "<>",
        "$1 €2 £3",
    ),
    *(
        "a.b.c",
        "a,b;c:d",
        "#hash @user",
        "http://example.org/a?b=c&d=e#f",
        "C:\\path\\file",
        "`x`|^~",
    ),
    "def f(x: int) -> int:\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) {\r\n\t\tsum += a[i];\r\n}",
    '{"key": [1, 2.5, null, true], "nested": {"a": "\\u00e9"}}',
    "<html><body class='x'>&amp;</body></html>\n",
    *("x" * 60, "ab" * 40, " " * 70, "\n" * 40, "=" * 65, "é" * 33, "漢" * 35, "😀" * 20, "1" * 50),
    *(
        "<0x41>",
        "<0x0A><0xFF>",
        "<0xZZ>",
        "\\x80\\xff",
        "\ufffd",
        "Ġhello ĊĊ",
        "▁hello▁▁world",
        "▁",
    ),
    *(BOS, EOS, TOOL, UNKNOWN, f"{BOS}hello{EOS}", f" {BOS} hello {EOS} ", f"a{TOOL}b {TOOL} c"),
    *(
        f"{BOS}{BOS}",
        f"{EOS}\n",
        f"<s >{BOS[:2]}",
        f"x{UNKNOWN}y",
        "<S>",
        "< s>",
        f"{TOOL}{TOOL} \n",
    ),
]


def _blocks(rng: random.Random) -> list[str]:
    """Two strings for each 128 code points: some of their characters, joined and separated."""
    result = []
    for start in range(0, 0x110000, 0x80):
        if start >= 0xF0000 and start % 0x4000:  # private use
            continue
        points = map(chr, range(start, start + 0x80))
        chars = [c for c in points if unicodedata.category(c) not in ("Cn", "Cs")]
        if chars and (not 0x3400 <= start < 0x32000 or start % 0x800 == 0 or len(chars) < 0x80):
            picked = [rng.choice(chars) for _ in range(8)]
            result += ["".join(picked), " a".join(picked[:5])]
    return result


@functools.cache
def corpus() -> list[str]:
    """Lines of the license, which never change, and the edge cases."""
    text = (ROOT / "LICENSE").read_text("utf-8")
    return text.splitlines(keepends=True) + [edge for edge in EDGES if len(edge) < 50] * 2


@functools.cache
def texts(count: int = 2000) -> list[str]:
    """Texts of every script and symbol, the same in every run."""
    rng = random.Random(0)
    result = EDGES + _blocks(rng)
    words = " ".join(corpus()).split(" ")
    gaps = [
        " ",
        " ",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "",
        "'s ",
        "'LL ",
        " 12 ",
        "345",
        ", ",
        "é",
        "漢",
    ]
    while len(result) < 2000:
        parts = [rng.choice(words) + rng.choice(gaps) for _ in range(rng.randint(1, 8))]
        result.append("".join(parts) + rng.choice(["", "", rng.choice(EDGES)]))
    if count < len(result):
        result = rng.sample(result, count)
    return result


def train_bpe(pre_tokenizer: Any, size: int = 600) -> Backend:
    """Byte-level BPE with BOS, EOS and a token that is not special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(corpus(), trainer)
    backend.add_tokens([TOOL])
    return backend


def bpe_metadata(backend: Backend, pre: str, **changes: object) -> dict[str, Any]:
    """As llama.cpp's converter writes it."""
    state = json.loads(backend.to_str())
    added = {token["content"]: token["special"] for token in state["added_tokens"]}
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = {True: CONTROL, False: USER_DEFINED}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds[added[t]] if t in added else NORMAL for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab[BOS],
        "tokenizer.ggml.eos_token_id": vocab[EOS],
        "tokenizer.ggml.add_bos_token": False,
        **changes,
    }


@functools.cache
def trained_pieces(size: int) -> tuple[list[str], list[str]]:
    """Merged pieces of sentencepiece's kind in the order of their merges, and characters."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {BOS, EOS, TOOL, UNKNOWN}
    kept = [t for t in tokens if t not in special and ("\n" not in t or not t.strip("\n"))]
    kept = [t for t in kept if "\0" not in t]  # ends a token in llama.cpp
    return [t for t in kept if len(t) > 1], [t for t in kept if len(t) == 1]


def sentencepiece_metadata(size: int = 700, **changes: object) -> dict[str, Any]:
    """Scores and types as in a file of sentencepiece's BPE; rare characters are only bytes."""
    merged, chars = trained_pieces(size)
    chars = [c for c in chars if ord(c) < 0x3000]
    merged = [t for t in merged if set(t) <= set(chars)]
    pieces = [(UNKNOWN, 0.0, UNKNOWN_TYPE), (BOS, 0.0, CONTROL), (EOS, 0.0, CONTROL)]
    pieces += [(f"<0x{i:02X}>", 0.0, BYTE) for i in range(256)]
    pieces += [(t, float(-i), NORMAL) for i, t in enumerate([*merged, *chars])]
    pieces += [(TOOL, -1000.0, USER_DEFINED), ("    ", -1000.0, USER_DEFINED)]
    pieces += [(f"[PAD{len(pieces)}]", -10000.0, UNUSED)]
    tokens, scores, types = map(list, zip(*pieces, strict=True))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def unigram_metadata(size: int = 700, **changes: object) -> dict[str, Any]:
    """Like T5's: padding, EOS and unknown first, log probabilities, spaces merged."""
    merged, chars = trained_pieces(size)
    rng = random.Random(1)
    pieces = [("<pad>", 0.0, CONTROL), (EOS, 0.0, CONTROL), (UNKNOWN, 0.0, UNKNOWN_TYPE)]
    pieces += [
        (t, -3 - rng.randint(0, 800) / 64, NORMAL) for t in merged + chars if ord(t[-1]) < 0x3000
    ]
    pieces += [(TOOL, -1000.0, USER_DEFINED), (f"[PAD{len(pieces) + 1}]", -10000.0, UNUSED)]
    tokens, scores, types = map(list, zip(*pieces, strict=True))
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        **changes,
    }


def charsmap(replacement: bytes = b" \0", **changes: int) -> np.ndarray:
    """A map of tabs and newlines to spaces; ``changes``: units of its trie."""
    units = np.zeros(256, np.uint32)
    units[0] = 16 << 10
    for char in (9, 10):
        units[16 ^ char] = 4 << 10 | 1 << 8 | char
        units[16 ^ char ^ 4] = 1 << 31
    for unit, value in changes.items():
        units[int(unit[1:])] = value
    data = np.uint32(units.nbytes).tobytes() + units.tobytes() + replacement
    return np.frombuffer(data, np.uint8)


class Reference:
    """What llama.cpp does with a vocabulary of scores."""

    def __init__(self, metadata: dict[str, Any]):
        self.metadata = metadata
        tokens = metadata["tokenizer.ggml.tokens"]
        self.types = metadata["tokenizer.ggml.token_type"]
        self.scores = metadata["tokenizer.ggml.scores"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        special = (UNKNOWN_TYPE, CONTROL, USER_DEFINED)
        found = [t for t in tokens if self.types[self.ids[t]] in special]
        self.special = sorted(found, key=lambda t: -len(t.encode()))

    def encode(self, text: str) -> list[int]:
        """Without BOS and EOS."""
        llama = self.metadata["tokenizer.ggml.model"] == "llama"
        prefix = self.metadata.get("tokenizer.ggml.add_space_prefix", llama)
        ids: list[int] = []
        for fragment in self._fragments(text):
            if isinstance(fragment, int):
                ids.append(fragment)
            elif llama:
                ids += self._merge((" " * prefix + fragment).replace(" ", "▁"))
            else:
                ids += self._best(self._normalize(fragment, prefix))
        return ids

    def _fragments(self, text: str) -> list[str | int]:
        fragments: list[str | int] = [text] if text else []
        for token in self.special:
            result: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    result.append(fragment)
                    continue
                for i, part in enumerate(fragment.split(token)):
                    result += [self.ids[token]] * (i > 0) + [part] * bool(part)
            fragments = result
        return fragments

    def _merge(self, text: str) -> list[int]:
        """The pair with the highest score first, and of equal ones the first in the text."""
        symbols: list[str] = list(text)
        next_, previous = list(range(1, len(text) + 1)), list(range(-1, len(text) - 1))
        queue: list[tuple[float, int, int, int]] = []

        def push(left: int, right: int) -> None:
            if left >= 0 and right < len(text):
                both = symbols[left] + symbols[right]
                if both in self.ids:
                    heapq.heappush(queue, (-self.scores[self.ids[both]], left, right, len(both)))

        for i in range(len(text) - 1):
            push(i, i + 1)
        while queue:
            _, left, right, size = heapq.heappop(queue)
            if not symbols[left] or not symbols[right]:
                continue
            if len(symbols[left]) + len(symbols[right]) != size:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            next_[left] = next_[right]
            if next_[right] < len(text):
                previous[next_[right]] = left
            push(previous[left], left)
            push(left, next_[left])
        ids = []
        for symbol in filter(None, symbols):
            if symbol in self.ids:
                ids.append(self.ids[symbol])
            else:
                ids += [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return ids

    def _normalize(self, text: str, prefix: bool) -> str:
        if self.metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
            return "".join("▁" + word for word in text.split(" ") if word)
        # As in sentencepiece. llama.cpp adds no space to a text of nothing but spaces.
        return "▁" * prefix + text.replace(" ", "▁")

    def _best(self, text: str) -> list[int]:
        """The tokens with the highest sum of scores."""
        tokens = {t: i for t, i in self.ids.items() if self.types[i] in (NORMAL, UNUSED)}
        least = min(s for s, kind in zip(self.scores, self.types, strict=True) if kind == NORMAL)
        longest = max(map(len, tokens))
        best: list[tuple[float, int, int]] = [(0.0, 0, 0)] + [(float("-inf"), 0, 0)] * len(text)
        unknown = self.ids[UNKNOWN]
        for start in range(len(text)):
            total = best[start][0]
            for end in range(start + 1, min(start + longest, len(text)) + 1):
                token = tokens.get(text[start:end])
                if token is not None and total + self.scores[token] > best[end][0]:
                    best[end] = (total + self.scores[token], start, token)
            if text[start] not in tokens and total + (least - 10) > best[start + 1][0]:
                best[start + 1] = (total + (least - 10), start, unknown)
        ids: list[int] = []
        end = len(text)
        while end:
            _, start, token = best[end]
            if not (ids and token == ids[-1] == unknown):
                ids.append(token)
            end = start
        return ids[::-1]
