"""Conversion between text and token ids with the checkpoint's ``tokenizer.json``."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kvjax.core.validation import CheckpointError, check_unicode
from kvjax.generation.detokenizer import TextStream

from .chat import ChatTemplates, Message, read_templates
from .files import Fields, read_json

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
          "mask_token")  # fmt: skip
_UNREAD = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "merges.txt")


class Tokenizer:
    """A checkpoint's tokenizer, with its special tokens and chat templates.

    As in Transformers, special tokens that occur in a text are encoded as such.

    Example:
      ```python
      ids = lm.tokenizer.encode("The json module")
      print(ids, lm.tokenizer.decode(ids))
      ```
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
          backend: the underlying tokenizer. Its padding and truncation are disabled.
          special_tokens: the texts of ``bos_token``, ``eos_token`` and so on.
          add_bos_token: whether ``encode`` adds the BOS token. None keeps the backend's behavior.
          add_eos_token: whether ``encode`` adds the EOS token. None keeps the backend's behavior.
          templates: the chat templates.
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
        """Return the ids that the backend itself adds before and after a text."""
        encoding = self.backend.encode("a")
        own = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
        if own:
            return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]
        ids = encoding.ids
        last = len(ids) - 1 if ids[-1:] == [self.eos_token_id] else len(ids)
        return ids[:last], ids[last:]

    @property
    def vocab_size(self) -> int:
        """The number of tokens. A model's vocabulary may be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The id of the beginning-of-sequence token, or None."""
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end-of-sequence token, or None."""
        return self._id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id of the padding token, or None."""
        return self._id("pad_token")

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text as token ids.

        Args:
          text: the text.
          add_special_tokens: whether to add the BOS and EOS tokens that the checkpoint specifies.
            The fields ``add_bos_token`` and ``add_eos_token`` of ``tokenizer_config.json`` take
            precedence over ``tokenizer.json``.

        Raises:
          ValueError: if the text contains a lone surrogate.
        """
        check_unicode("the text", text, "text")
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def starts(self, text: str) -> list[int]:
        """Return the character offset at which each token of ``encode(text)`` starts."""
        offsets, end = [], 0
        for first, last in self.backend.encode(text, add_special_tokens=False).offsets:
            # Some tokenizers do not include spaces in a token's span.
            offsets.append(end if text[end:first].isspace() else first)
            end = last
        return [*[0] * len(self._prefix), *offsets, *[len(text)] * len(self._suffix)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decode token ids to text. Unknown ids are skipped."""
        known = [int(i) for i in ids if 0 <= i < 2**32]
        return self.backend.decode(known, skip_special_tokens=skip_special_tokens)

    def stream(self, after: Iterable[int] = (), *, skip_special_tokens: bool = True) -> TextStream:
        """Return a decoder that decodes one token at a time.

        Args:
          after: the preceding tokens, such as the prompt. Their text is not returned, but some
            tokenizers need them to decode a leading space of the first new token.
          skip_special_tokens: whether to omit special tokens from the text.
        """
        return TextStream(
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), after
        )

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Render a conversation as text; see ``ChatTemplates.render``."""
        return self.templates.render(messages, **options)

    def chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Render a conversation and encode it as token ids.

        The template writes the special tokens itself, so no other ones are added, and there is
        never a second BOS token. Options and errors are the same as for ``ChatTemplates.render``.
        """
        return self.encode(self.render(messages, **options), add_special_tokens=False)


def _with(ids: list[int], token: int | None, add: bool | None, *, first: bool) -> list[int]:
    """Add or remove the BOS (``first``) or EOS token. None leaves ``ids`` unchanged."""
    if add is None or token is None or add == (token in ids):
        return ids
    if not add:
        return [i for i in ids if i != token]
    return [token, *ids] if first else [*ids, token]


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Read a checkpoint's tokenizer. Returns None if the folder has no tokenizer file.

    Raises:
      CheckpointError: if a file can't be read, or the tokenizer's format is not supported.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        unsupported = [name for name in _UNREAD if (folder / name).exists()]
        if not unsupported:
            return None
        raise CheckpointError(
            f"{folder}: the tokenizer is in {unsupported[0]}, which is not read; expected "
            "tokenizer.json. Convert it with transformers (and sentencepiece for "
            'tokenizer.model): python -c "from transformers import AutoTokenizer as T; '
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


def _token(config: Fields, name: str, value: object) -> tokenizers.AddedToken:
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True, normalized=False)
    known = ("single_word", "lstrip", "rstrip", "normalized", "special")
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise config.wrong(name, "a string, or an object with content")
    flags = {key: bool(value[key]) for key in known if key in value}
    return tokenizers.AddedToken(value["content"], **{"special": True, **flags})


def _add_tokens(
    backend: tokenizers.Tokenizer, config: Fields, named: dict[str, tokenizers.AddedToken]
) -> None:
    """Add the tokens that are only in ``tokenizer_config.json``, as Transformers does."""
    decoder = config.inner("added_tokens_decoder")
    if decoder is not None:
        if not all(key.isdecimal() for key in decoder.values):
            raise config.wrong("added_tokens_decoder", "an object whose keys are token ids")
        for key in sorted(decoder.values, key=int):
            backend.add_tokens([_token(decoder, key, decoder.values[key])])
    existing = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = config.raw("additional_special_tokens") or config.raw("extra_special_tokens") or []
    values = list(extra.values()) if isinstance(extra, dict) else list(extra)
    tokens = [*named.values(), *(_token(config, "extra_special_tokens", v) for v in values)]
    backend.add_special_tokens([token for token in tokens if token.content not in existing])
