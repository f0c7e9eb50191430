"""Tokenizers, streaming, and chat templates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

import kvjax
from kvjax.models import LanguageModel
from kvjax.models.text import Tokenizer, read_tokenizer
from tests.checkpoints import write_tokenizer

BOS, EOS = 256, 257


def read(folder: Path, **config: Any) -> Tokenizer:
    write_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def with_processor(folder: Path, single: str) -> None:
    """Make ``tokenizer.json`` put special tokens round a text."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    special = [("<s>", BOS), ("</s>", EOS)]
    backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=single, special_tokens=[pair for pair in special if pair[0] in single]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))


def test_round_trip(tmp_path: Path) -> None:
    tokenizer = read(tmp_path)
    text = "naïve — “quoted” 😀\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.array(ids)) == text
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (258, BOS, EOS)
    assert tokenizer.pad_token_id is None


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer = read(tmp_path)
    ids = tokenizer.encode("a<s>b</s>")
    assert ids[1::2] == [BOS, EOS]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<s>b</s>"


@pytest.mark.parametrize(
    ("single", "config", "first", "last"),
    [
        (None, {}, False, False),
        (None, {"add_bos_token": True}, True, False),
        (None, {"add_bos_token": True, "add_eos_token": True}, True, True),
        ("<s> $A", {"add_bos_token": None}, True, False),
        ("<s> $A", {"add_bos_token": True}, True, False),
        ("<s> $A", {"add_bos_token": False}, False, False),
        ("<s> $A </s>", {"add_bos_token": None}, True, True),
        ("<s> $A </s>", {"add_bos_token": None, "add_eos_token": False}, True, False),
    ],
)
def test_bos_and_eos(
    tmp_path: Path, single: str | None, config: dict, first: bool, last: bool
) -> None:
    """One BOS token and no padding or truncation, whatever the files say of each."""
    read(tmp_path, **config)
    if single:
        with_processor(tmp_path, single)
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer is not None
    for text in ("hello there", ""):
        ids = tokenizer.encode(text)
        bare = tokenizer.encode(text, add_special_tokens=False)
        assert len(bare) == len(text)
        assert ids == [BOS] * first + bare + [EOS] * last


def test_tokens_of_the_config(tmp_path: Path) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = read(
        tmp_path,
        pad_token="<pad>",
        additional_special_tokens=["<extra>"],
        added_tokens_decoder={"258": {"content": "<more>", "special": False, **flags}},
    )
    assert tokenizer.encode("<more><pad><extra>") == [258, 259, 260]
    assert tokenizer.decode([258, 259, 260]) == "<more>"
    assert tokenizer.pad_token_id == 259


def test_an_older_special_tokens_map(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokens = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)
    assert tokenizer.encode("ab") == tokenizer.encode("ab", add_special_tokens=False)


def test_stream(tmp_path: Path) -> None:
    """Pieces join to the whole, and a character comes when its last byte does."""
    tokenizer = read(tmp_path)
    text = "é漢😀 plain"
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert pieces[:9] == ["", "é", "", "", "漢", "", "", "", "😀"]
    assert stream.finish() == ""


def test_stream_ends_inside_a_character(tmp_path: Path) -> None:
    tokenizer = read(tmp_path)
    ids = tokenizer.encode("a漢")[:-1]
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids] == ["a", "", ""]
    assert stream.finish() == tokenizer.decode(ids)[1:] == "\N{REPLACEMENT CHARACTER}"
    assert stream.push(ids[0]) == "a"


def test_stream_leaves_out_special_tokens(tmp_path: Path) -> None:
    tokenizer = read(tmp_path)
    ids = tokenizer.encode("a</s>b")
    stream, shown = tokenizer.stream(), tokenizer.stream(skip_special_tokens=False)
    assert [stream.push(token) for token in ids] == ["a", "", "b"]
    assert [shown.push(token) for token in ids] == ["a", "</s>", "b"]


def spaced() -> Tokenizer:
    """Like sentencepiece: ▁ for a space, which the text's first word loses, and bytes."""
    words = ["▁one", "▁two", "!", *(f"<0x{i:02X}>" for i in range(256))]
    backend = Backend(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    strip = decoders.Strip(" ", 1, 0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    backend.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    return Tokenizer(backend)


def test_stream_keeps_spaces_between_words() -> None:
    tokenizer = spaced()
    stream = tokenizer.stream()
    assert [stream.push(i) for i in (0, 1, 2, 0)] == ["one", " two", "!", " one"]
    after = tokenizer.stream(after=[0, 1])
    assert [after.push(i) for i in (0, 2)] == [" one", "!"]


def test_stream_survives_stray_bytes() -> None:
    """A stray byte spoils the characters beside it in a decoded whole, not in what was given."""
    tokenizer, stream = spaced(), spaced().stream()
    euro = [3 + byte for byte in "€".encode()]
    assert [stream.push(i) for i in euro] == ["", "", "€"]
    pieces = [stream.push(i) for i in (3 + 0xFF, 2, 0)]
    assert "".join(pieces).endswith("! one")
    assert not tokenizer.decode([*euro, 3 + 0xFF]).startswith("€")


def test_stream_does_not_wait_for_ever(tmp_path: Path) -> None:
    tokenizer = read(tmp_path)
    stream = tokenizer.stream()
    (stray,) = (i for i in range(256) if tokenizer.backend.id_to_token(i) == "ÿ")
    pieces = [stream.push(stray) for _ in range(200)]
    assert "".join(pieces) + stream.finish() == 200 * "\N{REPLACEMENT CHARACTER}"
    assert sum(map(bool, pieces)) >= 2


def test_random_ids_stream_to_their_text(tmp_path: Path) -> None:
    tokenizer = read(tmp_path)
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = rng.integers(0, 256, 60).tolist()
        stream = tokenizer.stream()
        text = "".join(stream.push(i) for i in ids) + stream.finish()
        assert text == tokenizer.decode(ids)


def test_chat(tmp_path: Path) -> None:
    """The template's BOS token is the only one, though plain texts get one too."""
    tokenizer = read(tmp_path, add_bos_token=True)
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>[user]hi</s>[assistant]"
    assert ids.count(BOS) == 1
    assert tokenizer.render([{"role": "user", "content": "x"}], add_generation_prompt=False) == (
        "<s>[user]x</s>"
    )


def test_the_last_message_goes_on(tmp_path: Path) -> None:
    """Cut behind its text, without an end of its turn; what a template changes is refused."""
    tokenizer = read(tmp_path)

    def ends(content: Any, **more: Any) -> str:
        messages = [{"role": "user", "content": "x y"}, {"role": "assistant", "content": content}]
        return tokenizer.render(messages, continue_final_message=True, **more)

    assert ends(" x y ") == "<s>[user]x y</s>[assistant] x y "
    assert ends("", add_generation_prompt=False) == "<s>[user]x y</s>[assistant]"
    told = [{"role": "assistant", "content": "x"}]
    assert tokenizer.decode(tokenizer.chat(told, continue_final_message=True)).endswith("]x")
    assert told == [{"role": "assistant", "content": "x"}]
    parts = "{% for m in messages %}{{ m.content[0].text }};{% endfor %}"
    assert ends([{"type": "text", "text": "so "}], template=parts).endswith(";so ")
    trims = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    assert ends("so", template=trims) == "<x y><so"
    changes = "{% for m in messages %}<{{ m.content.split('|')[-1] }}>{% endfor %}"
    for content, template in (
        ("so ", trims), (" so", trims), ("a|b", changes), ("so", "{{ messages[0].content }}"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"strips or changes the last message, '{content[0]}"):
            ends(content, template=template)
    with pytest.raises(ValueError, match="pass add_generation_prompt=False"):
        ends("so", add_generation_prompt=True)
    for content in (None, [], [{"type": "image"}]):
        with pytest.raises(ValueError, match="the last message has no text to continue"):
            ends(content)


def test_where_tokens_begin(tmp_path: Path) -> None:
    """In the text as it was given, which lacks the BOS token; spaces are a token's own."""
    tokenizer = read(tmp_path, add_bos_token=True)
    assert tokenizer.encode("a<s>é ")[:4] == [BOS, 64, BOS, *tokenizer.encode("é")[1:2]]
    assert tokenizer.starts("a<s>é ") == [0, 0, 1, 4, 4, 5]
    assert tokenizer.starts("") == [0]
    backend = Backend(models.BPE(vocab={"a": 0, "Ġ": 1, "Ġa": 2}, merges=[("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.post_processor = processors.ByteLevel(trim_offsets=True)  # type: ignore[assignment]
    trimming = Tokenizer(backend)
    assert trimming.encode("a a  a") == [0, 2, 1, 2]
    assert trimming.starts("a a  a") == [0, 1, 3, 4]


def test_template_helpers(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{{ m | tojson(sort_keys=true) }}{% endfor %}"
        "{% generation %}g{% endgeneration %}{{ strftime_now('%Y') | length }}{{ mode }}"
        "{{ tools is none }}{{ messages[0].content is defined }}"
    )
    tokenizer = read(tmp_path, chat_template=template)
    messages = [{"role": "é<", "content": None}, {"role": "b"}]
    assert tokenizer.render(messages, mode="x") == '{"role": "é<"}g4xTrueFalse'


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tokenizer = read(tmp_path, chat_template=named)
    messages = [{"role": "user", "content": ""}]
    assert tokenizer.render(messages) == "d"
    assert tokenizer.render(messages, tools=[{"a": 1}]) == "t"
    assert tokenizer.render(messages, name="tool_use") == "t"
    with pytest.raises(ValueError, match="no chat template 'x'; expected one of default, tool_use"):
        tokenizer.render(messages, name="x")


def test_template_files_go_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "other.jinja").write_text("another")
    tokenizer = read(tmp_path)
    messages = [{"role": "user", "content": ""}]
    assert tokenizer.render(messages) == "from the file"
    assert tokenizer.render(messages, name="other") == "another"


def test_the_template_of_an_older_multimodal_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}!"}')
    messages = [{"role": "user", "content": "Hi"}]
    assert read(tmp_path, chat_template=None).render(messages) == "Hi!"
    assert read(tmp_path, chat_template="the tokenizer's").render(messages) == "the tokenizer's"
    (tmp_path / "chat_template.json").write_text('{"chat_template": 3}')
    with pytest.raises(kvjax.CheckpointError, match=r"template\.json: chat_template is 3; exp"):
        read(tmp_path, chat_template=None)


def test_a_template_that_reads_contents_in_parts(tmp_path: Path) -> None:
    """A text is not lost, even one that the template's own words have in them."""
    template = (
        "{% for m in messages %}{{ m.role }}:{% for part in m.content | selectattr('type', "
        "'equalto', 'text') %}{{ part.text }}{% endfor %};{% endfor %}"
    )
    tokenizer = read(tmp_path, chat_template=template)
    messages = [{"role": "user", "content": "use"}, {"role": "assistant"}]
    assert tokenizer.render(messages) == "user:use;assistant:;"
    parts = [{"type": "image"}, {"type": "text", "text": "Hi"}]
    assert tokenizer.render([{"role": "user", "content": parts}]) == "user:Hi;"
    strict = "{{ messages[0].content[0].text + '!' }}"
    assert tokenizer.render(messages, template=strict) == "use!"


@pytest.mark.parametrize(
    ("template", "kind", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", ValueError, "roles must alternate"),
        ("{% if %}", kvjax.CheckpointError, "the chat template fails"),
        ("{{ ''.__class__.__mro__ }}", kvjax.CheckpointError, "unsafe"),
        ("{{ messages.append(1) }}", kvjax.CheckpointError, "the chat template fails"),
        ("{{ messages[0].content + 1 }}", kvjax.CheckpointError, "the chat template fails"),
        ("{% for i in range(10**9) %}{% endfor %}", kvjax.CheckpointError, "Range too big"),
        ("{% include 'config.json' %}", kvjax.CheckpointError, "the chat template fails"),
    ],
)
def test_templates_that_fail(tmp_path: Path, template: str, kind: type, message: str) -> None:
    tokenizer = read(tmp_path, chat_template=template)
    with pytest.raises(kind, match=message) as error:
        tokenizer.render([{"role": "user", "content": "x"}])
    assert isinstance(error.value, kvjax.CheckpointError) == (kind is kvjax.CheckpointError)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        (["hi"], "a message must be a dict with a role, got 'hi'"),
        ([{"content": "x"}], "a message must be a dict with a role"),
        ([{"role": "user", "content": object()}], "must be plain data"),
    ],
)
def test_wrong_messages(tmp_path: Path, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path).chat(messages)


def test_no_template(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, chat_template=None)
    with pytest.raises(ValueError, match="this checkpoint has no chat template"):
        tokenizer.chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": 3}, "chat_template is 3; expected a string, or a list"),
        ({"chat_template": [{"name": "x"}]}, "chat_template is .*; expected a string, or a list"),
        ({"bos_token": 5}, "bos_token is 5; expected a string"),
        ({"add_bos_token": "yes"}, 'add_bos_token is "yes"; expected true or false'),
        ({"added_tokens_decoder": {"x": {}}}, "keys are token ids"),
    ],
)
def test_wrong_fields(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(kvjax.CheckpointError, match=f"tokenizer_config.json: .*{message}"):
        read(tmp_path, **config)


def test_not_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(kvjax.CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_forms_that_are_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(kvjax.CheckpointError, match=f"in {name}, which is not read.*AutoTokenizer"):
        read_tokenizer(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path) is None


def test_encode_a_batch(tiny_llama: LanguageModel) -> None:
    tokens, lengths = tiny_llama.encode(["abc", "a"])
    assert tokens.dtype == lengths.dtype == np.int32
    assert tokens.shape == (2, 3) and lengths.tolist() == [3, 1]
    assert not tokens.committed and not lengths.committed
    assert tiny_llama.decode(tokens[0]) == "abc"
    again, _ = tiny_llama.encode([[int(i) for i in tokens[0]], np.array([int(tokens[1, 0])])])  # type: ignore[list-item]
    assert (again == tokens).all()
    single, _ = tiny_llama.encode("abc")
    assert single.tolist() == tokens[:1].tolist()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "the list of texts is empty"),
        (["a", ""], "prompt 1 is empty"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, 258]], "token id 258 is out of range: the vocabulary has 258 tokens, 0 to 257"),
        ([[-1]], "token id -1 is out of range"),
        ([[1.5]], "expected one row of token ids"),
        ([[[1]]], "expected one row of token ids"),
    ],
)
def test_wrong_prompts(tiny_llama: LanguageModel, texts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_llama.encode(texts)


def test_decode_takes_one_row(tiny_llama: LanguageModel) -> None:
    with pytest.raises(ValueError, match="expected one row of token ids"):
        tiny_llama.decode([[1, 2]])  # type: ignore[list-item]
    assert tiny_llama.decode([]) == ""


def test_chat_of_the_model(tiny_llama: LanguageModel) -> None:
    ids = tiny_llama.chat([{"role": "user", "content": "hi"}])
    assert tiny_llama.decode(ids, skip_special_tokens=False) == "<s>[user]hi</s>[assistant]"
