"""Text to token ids and back, by the checkpoint's own ``tokenizer.json``."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kvjax.core.errors import CheckpointError
from kvjax.core.validation import check_unicode
from kvjax.generation.detokenizer import TextStream

from .chat import ChatTemplates, Message, read_templates
from .json_fields import Fields, read_json

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
          "mask_token")  # fmt: skip
_UNREAD = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "merges.txt")


class Tokenizer:
    """A checkpoint's tokenizer, with its special tokens and chat templates.

    Texts may contain special tokens by name, as in Transformers.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        add_bos_token: bool | None = None,
        add_eos_token: bool | None = None,
        templates: ChatTemplates | None = None,
    ):
        """Wrap a backend.

        Args:
          backend: what splits texts; padding and truncation are switched off in it.
          special_tokens: ``bos_token``, ``eos_token`` and so on to their texts.
          add_bos_token: whether texts begin with the BOS token; None leaves it to the backend.
          add_eos_token: whether texts end with the EOS token, likewise.
          templates: chat templates.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.templates = templates or ChatTemplates({}, {}, "tokenizer")
        self._prefix, self._suffix = self._added()
        self._prefix = _with(self._prefix, self.bos_token_id, add_bos_token, first=True)
        self._suffix = _with(self._suffix, self.eos_token_id, add_eos_token, first=False)

    def _added(self) -> tuple[list[int], list[int]]:
        """What the backend itself puts before and after a text."""
        encoding = self.backend.encode("a")
        own = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
        if own:
            return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]
        ids = encoding.ids
        last = len(ids) - 1 if ids[-1:] == [self.eos_token_id] else len(ids)
        return ids[:last], ids[last:]

    @property
    def vocab_size(self) -> int:
        """Tokens it knows; a model's vocabulary may be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills up shorter rows."""
        return self._id("pad_token")

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the BOS and EOS tokens that the checkpoint asks for, or none.

        An explicit ``add_bos_token`` or ``add_eos_token`` of ``tokenizer_config.json`` goes
        before what ``tokenizer.json`` does by itself.

        Raises:
          ValueError: if the text has half a character (a lone surrogate).
        """
        check_unicode("the text", text)
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def starts(self, text: str) -> list[int]:
        """Of each token that ``encode`` gives for a text, the characters of the text before it."""
        found, end = [], 0
        for first, last in self.backend.encode(text, add_special_tokens=False).offsets:
            # Some tokenizers leave spaces out of what a token spans.
            found.append(end if text[end:first].isspace() else first)
            end = last
        return [*[0] * len(self._prefix), *found, *[len(text)] * len(self._suffix)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that it does not know are left out."""
        known = [int(i) for i in ids if 0 <= i < 2**32]
        return self.backend.decode(known, skip_special_tokens=skip_special_tokens)

    def stream(self, after: Iterable[int] = (), *, skip_special_tokens: bool = True) -> TextStream:
        """Decode one token at a time.

        Args:
          after: tokens that stand before the first, such as the prompt's; their text is not given
            again, but a leading space of the first new token shows only behind another.
          skip_special_tokens: whether special tokens have no text.
        """
        return TextStream(
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), after
        )

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The text of a conversation; see ``ChatTemplates.render``."""
        return self.templates.render(messages, **options)

    def chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation, ready to be answered.

        The template writes the special tokens itself, so none is added: there is never a second
        BOS token. Options and errors are those of ``ChatTemplates.render``.
        """
        return self.encode(self.render(messages, **options), add_special_tokens=False)


def _with(ids: list[int], token: int | None, wanted: bool | None, *, first: bool) -> list[int]:
    """``ids`` with or without the BOS (``first``) or EOS token, as wanted."""
    if wanted is None or token is None or wanted == (token in ids):
        return ids
    if not wanted:
        return [i for i in ids if i != token]
    return [token, *ids] if first else [*ids, token]


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None where the folder has no file of one.

    Raises:
      CheckpointError: if a file can't be read, or the tokenizer is in a form that is not read.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        found = [name for name in _UNREAD if (folder / name).exists()]
        if not found:
            return None
        raise CheckpointError(
            f"{folder}: the tokenizer is in {found[0]}, which is not read; expected "
            "tokenizer.json. Convert it once, where transformers is installed (and sentencepiece, "
            'for tokenizer.model): python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
    config = Fields(folder / "tokenizer_config.json", {})
    if config.file.exists():
        config = Fields(config.file, read_json(config.file))
    named = _special_tokens(folder, config)
    _add_tokens(backend, config, named)
    special = {name: str(token.content) for name, token in named.items()}
    return Tokenizer(
        backend,
        special_tokens=special,
        add_bos_token=_optional(config, "add_bos_token"),
        add_eos_token=_optional(config, "add_eos_token"),
        templates=read_templates(folder, config, special),
    )


def _optional(config: Fields, name: str) -> bool | None:
    return None if config.raw(name) is None else config.flag(name, False)


def _special_tokens(folder: Path, config: Fields) -> dict[str, tokenizers.AddedToken]:
    older = folder / "special_tokens_map.json"
    values = read_json(older) if older.exists() else {}
    values = {**values, **{name: v for name, v in config.values.items() if v is not None}}
    return {
        name: _token(config, name, values[name]) for name in _NAMED if values.get(name) is not None
    }


def _token(config: Fields, name: str, value: Any) -> tokenizers.AddedToken:
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True, normalized=False)
    known = ("single_word", "lstrip", "rstrip", "normalized", "special")
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise config.wrong(name, "a token's text, or an object with its content")
    flags = {key: bool(value[key]) for key in known if key in value}
    return tokenizers.AddedToken(value["content"], **{"special": True, **flags})


def _add_tokens(
    backend: tokenizers.Tokenizer, config: Fields, named: dict[str, tokenizers.AddedToken]
) -> None:
    """Tokens that ``tokenizer_config.json`` has and ``tokenizer.json`` lacks, as Transformers
    adds them."""
    decoder = config.inner("added_tokens_decoder")
    if decoder is not None:
        if not all(key.isdecimal() for key in decoder.values):
            raise config.wrong("added_tokens_decoder", "an object whose keys are token ids")
        for key in sorted(decoder.values, key=int):
            backend.add_tokens([_token(decoder, key, decoder.values[key])])
    held = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = config.raw("additional_special_tokens") or config.raw("extra_special_tokens") or []
    values = list(extra.values()) if isinstance(extra, dict) else list(extra)
    tokens = [*named.values(), *(_token(config, "extra_special_tokens", v) for v in values)]
    backend.add_special_tokens([token for token in tokens if token.content not in held])
