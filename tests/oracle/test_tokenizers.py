"""Tokenizers and chat templates equal Transformers' AutoTokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from kvjax.models.text import Tokenizer as Ours
from kvjax.models.text import read_tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other dog",
    "def encode(text): return [ids for ids in tokenizer(text)]  # a comment",
    "naïve café — “quoted” text, 1234567890 and Ünïcödé",
] * 3

TEXTS = [
    "",
    "the quick dog",
    " leading and  double   spaces ",
    "tabs\tand\nnew lines\r\n\n",
    "naïve — “quoted” 😀 漢字",
    "special <s> inside </s> text<|extra|>end <extra2> x",
    "x" * 50,
]

TEMPLATE = """\
{{- bos_token }}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{% for message in messages %}
    {%- if message.role == "forbidden" %}{{ raise_exception("no such role") }}{% endif %}
    {%- if loop.first and message['role'] == 'system' %}<<{{ message.content | trim }}>>
    {%- continue %}{% endif %}
[{{ message['role'] }}]
    {%- generation %} {{ message.content }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}[assistant]{{ mode | default("plain") }}{% endif %}"""

MESSAGES = [
    [{"role": "user", "content": "hello the dog <b>&</b>"}],
    [
        {"role": "system", "content": "  be kind "},
        {"role": "user", "content": "quick"},
        {"role": "assistant", "content": "brown", "tool_calls": None},
        {"role": "user", "content": "naïve — 😀"},
    ],
    [
        {"role": "user", "content": "call"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
    ],
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # type: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_like(*, processor: bool) -> Tokenizer:
    """As converted from sentencepiece: ▁ for spaces, a token a byte for what is unknown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer.train_from_iterator(
        [line[:40] for line in CORPUS],
        trainers.BpeTrainer(vocab_size=400, special_tokens=special[:3] + special[3:]),
    )
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(  # type: ignore
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    if processor:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def added(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": content, **plain, "special": True, **flags}


def with_padding(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.enable_truncation(3)
    return tokenizer


BUILDS: dict[str, Callable[[Path], None]] = {
    "byte-level": lambda f: write(f, byte_level(), {"bos_token": "<s>", "eos_token": "</s>"}),
    "sentencepiece": lambda f: write(
        f,
        sentencepiece_like(processor=True),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True},
    ),
    "no-processor": lambda f: write(
        f,
        sentencepiece_like(processor=False),
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False},
    ),
    "new-tokens": lambda f: write(
        f,
        byte_level(),
        {
            "bos_token": {"__type": "AddedToken", **added("<s>")},
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "additional_special_tokens": ["<|extra|>"],
            "added_tokens_decoder": {
                "0": added("<s>"),
                "1": added("</s>"),
                "400": added("<extra2>", special=False, lstrip=True),
            },
        },
    ),
    "base-vocabulary": lambda f: write(
        f, byte_level(), {"bos_token": "the", "eos_token": "</s>", "unk_token": None}
    ),
}


@pytest.fixture(params=[*BUILDS, "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, transformers: Any) -> Any:
    """The same files read by both."""
    if request.param in BUILDS:
        BUILDS[request.param](tmp_path)
        model_type = "llama"
    else:
        model_type = request.param.removesuffix("Tokenizer").lower()
        source = sentencepiece_like(processor=True) if model_type == "llama" else byte_level()
        model = json.loads(source.to_str())["model"]
        merges = [tuple(merge) for merge in model["merges"]]
        cls = getattr(transformers, request.param)
        named = {"eos_token": "</s>", "unk_token": "<s>" if model_type != "llama" else "<unk>"}
        if model_type != "qwen2":
            named["bos_token"] = "<s>"
        tokenizer = cls(vocab=model["vocab"], merges=merges, add_bos_token=True, **named)
        tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    ours = read_tokenizer(tmp_path)
    assert ours is not None
    return ours, transformers.AutoTokenizer.from_pretrained(tmp_path)


def test_ids_and_text(pair: Any) -> None:
    ours, theirs = pair
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        bare = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == bare, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(theirs, name) is not None:
            assert getattr(ours, name) == getattr(theirs, name)


def test_chat(pair: Any) -> None:
    ours, theirs = pair
    tools = [{"type": "function", "function": {"name": "f<", "parameters": {"é": 1}}}]
    for messages in MESSAGES:
        for options in ({}, {"tools": tools, "mode": "x"}, {"add_generation_prompt": False}):
            asked = {"add_generation_prompt": True, **options}
            text = theirs.apply_chat_template(messages, tokenize=False, **asked)
            assert ours.render(messages, **options) == text
            ids = theirs.apply_chat_template(messages, return_dict=False, **asked)
            assert ours.chat(messages, **options) == ids
            assert ids[:2] != [ours.bos_token_id] * 2


def test_truncation_in_the_file_is_switched_off(tmp_path: Path, transformers: Any) -> None:
    write(tmp_path, with_padding(byte_level()), {"bos_token": "<s>"})
    ours = read_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert isinstance(ours, Ours)
    assert ours.encode(TEXTS[2]) == theirs(TEXTS[2], truncation=False)["input_ids"]
    assert len(ours.encode(TEXTS[2])) > 3


def test_explicit_bos_goes_before_the_file(tmp_path: Path, transformers: Any) -> None:
    """Where ``add_bos_token`` contradicts ``tokenizer.json``, it counts here, as in Transformers
    before 5, for which most such files were written; since 5 it is not read."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    write(tmp_path, byte_level(), config)
    ours = read_tokenizer(tmp_path)
    assert ours is not None and ours.encode("the")[0] == ours.bos_token_id
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.encode("the", add_special_tokens=False) == theirs("the")["input_ids"]
