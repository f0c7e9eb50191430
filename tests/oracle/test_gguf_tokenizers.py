"""Tokenizers from GGUF metadata equal those that Transformers makes of it.

Where the two differ, llama.cpp's behavior is the right one, and each test names the difference.
"""

import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from benchmarks.real import REASON, real_model_file
from kvjax.models.gguf import read_gguf
from kvjax.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from kvjax.models.gguf.tokenizer import gguf_tokenizer
from kvjax.models.text import Tokenizer
from tests import gguf_tokenizers as gguf
from tests.test_gguf_tokenizer import FAMILIES

KEYS = {
    "tokenizer_type": "model",
    "pre_tokenizer_type": "pre",
    **{name: name for name in ("tokens", "scores", "token_type", "merges")},
}


def ours(metadata: dict[str, Any]) -> Tokenizer:
    tokenizer = gguf_tokenizer(Path("model.gguf"), metadata)
    assert tokenizer is not None
    return tokenizer


def theirs(transformers: Any, metadata: dict[str, Any], architecture: str = "llama") -> Any:
    from transformers.integrations.gguf import convert_gguf_tokenizer  # pyright: ignore[reportPrivateImportUsage]

    named = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in KEYS.items()}
    named = {name: value for name, value in named.items() if value is not None}
    return convert_gguf_tokenizer(architecture, named)[0]


def check_equal(
    tokenizer: Tokenizer, backend: Any, texts: list[str], *, decode: bool = True
) -> None:
    assert len(texts) > 900
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == backend.encode(text, add_special_tokens=False).ids, text
        if decode:
            decoded = backend.decode(ids, skip_special_tokens=False)
            assert tokenizer.decode(ids, skip_special_tokens=False) == decoded


@pytest.mark.slow(but=("qwen2",))
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"])
def test_byte_level_bpe(transformers: Any, pre: str) -> None:
    metadata = gguf.bpe_metadata(gguf.train_bpe(FAMILIES[pre]()), pre)
    backend = theirs(transformers, metadata)
    # Transformers never sets this, so that a word without merges is cut there.
    backend.model.ignore_merges = PRE_TOKENIZERS[pre].ignore_merges
    check_equal(ours(metadata), backend, gguf.texts())


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["smollm", "falcon", "deepseek-v3", "bloom", "superbpe"])
def test_splits_that_transformers_does_not_know(transformers: Any, pre: str) -> None:
    """It splits these by GPT-2's regex; all else is the same."""
    metadata = gguf.bpe_metadata(gguf.train_bpe(FAMILIES[pre]()), pre)
    backend = theirs(transformers, metadata)
    tokenizer = ours(metadata)
    assert any(
        tokenizer.encode(text) != backend.encode(text, add_special_tokens=False).ids
        for text in gguf.texts()
    )
    backend.pre_tokenizer = FAMILIES[pre]()
    check_equal(tokenizer, backend, gguf.texts())


@pytest.mark.slow(but=("phi3",))
@pytest.mark.parametrize("architecture", ["phi3", "llama", "gemma2"])
def test_sentencepiece_bpe(transformers: Any, architecture: str) -> None:
    prefix = architecture != "gemma2"
    metadata = gguf.sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": prefix})
    backend = theirs(transformers, metadata, architecture)
    tokenizer, texts = ours(metadata), gguf.texts()
    if architecture == "gemma2":
        # Transformers spells a token of spaces with ▁ and merges it like a word. llama.cpp finds
        # it before it splits words.
        texts = [text for text in texts if "    " not in text]
    if architecture == "llama":
        # In Transformers, only the start of a text gets a space, and none in front of a space or
        # ▁. sentencepiece and llama.cpp always add it, after special tokens too.
        special = re.compile("|".join(map(re.escape, ("<s>", "</s>", "<tool>", "<unk>", "    "))))
        texts = [t for t in texts if not special.search(t) and not t.startswith((" ", "▁"))]
    check_equal(tokenizer, backend, texts)


@pytest.mark.slow
def test_unigram(transformers: Any) -> None:
    metadata = gguf.unigram_metadata()
    backend = theirs(transformers, metadata)
    # Transformers splits at all white space. llama.cpp splits at spaces, and the character map,
    # which this file has not, makes spaces of others.
    texts = [text for text in gguf.texts() if text.split() == [w for w in text.split(" ") if w]]
    # It also adds no space in front of ▁, and rounding breaks ties in runs of a character.
    texts = [text for text in texts if "▁" not in text and not re.search(r"(.)\1\1", text)]
    # T5's 100 blanks are in no file.
    check_equal(ours(metadata), backend, texts, decode=False)


FILE = real_model_file()
MESSAGES = [
    [{"role": "user", "content": "What is 12 + 345?"}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello\n\nthere  you"},
        {"role": "assistant", "content": "Hi <|im_end|> 👋"},
        {"role": "user", "content": "naïve — “quoted”"},
    ],
]


@pytest.fixture(scope="module")
def smollm2(transformers: Any) -> tuple[Tokenizer, Any]:
    """A real file's tokenizer, and what Transformers makes of it."""
    if FILE is None:
        pytest.skip(REASON)
    tokenizer = gguf_tokenizer(FILE, read_gguf(FILE).metadata)
    assert tokenizer is not None
    reference = transformers.AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
    return tokenizer, reference


@pytest.mark.slow
def test_smollm2(smollm2: tuple[Tokenizer, Any]) -> None:
    tokenizer, reference = smollm2
    without = [text for text in gguf.texts() if not any(map(is_number, text))]
    check_equal(tokenizer, reference.backend_tokenizer, without)
    # The model was trained with each digit on its own, which Transformers does not know.
    digits, words = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = type(reference.backend_tokenizer).from_str(reference.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    check_equal(tokenizer, backend, gguf.texts())


def is_number(char: str) -> bool:
    return unicodedata.category(char)[0] == "N"


@pytest.mark.slow
def test_smollm2_chats(smollm2: tuple[Tokenizer, Any]) -> None:
    tokenizer, reference = smollm2
    for messages in MESSAGES:
        for prompt in (False, True):
            text = reference.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
            assert tokenizer.render(messages, add_generation_prompt=prompt) == text
            ids = tokenizer.chat(messages, add_generation_prompt=prompt)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            assert ids[0] == tokenizer.bos_token_id == 1
            assert (ids.count(1), ids.count(2)) == (
                text.count("<|im_start|>"),
                text.count("<|im_end|>"),
            )
    assert tokenizer.special_tokens["eos_token"] == reference.eos_token
