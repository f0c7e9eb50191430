"""Guides by llguidance: constraints by JSON schema, regular expression, grammar or choice."""

import copy
import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from kvjax.core.typing import Json
from kvjax.core.validation import as_list, as_python, check_unicode, short_repr
from kvjax.generation.loaded_model import LanguageModel


class Guides:
    """Creates guides for a model. All guides share the prepared tokenizer.

    ``generate`` copies the guides that it receives. An engine advances a guide itself, so every
    request needs its own: ``engine.submit(prompt, guide=guide.copy())``. At the end of its grammar,
    a guide allows only end-of-text tokens.

    Raises:
      ValueError: if llguidance is not installed, or the model has no ``tokenizer.json`` or no
        end-of-text token.

    Example:
      ```python
      guide = kvjax.Guides(lm).json_schema({"type": "boolean"})
      result = kvjax.generate(lm, "Is it true? ", guide=guide, max_new_tokens=8)
      ```
    """

    def __init__(self, lm: LanguageModel) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise ValueError('guides need llguidance: pip install "kvjax[guided]"')
        import llguidance

        backend: Any = getattr(lm.tokenizer, "backend", None)
        if not hasattr(backend, "to_str"):
            raise ValueError("guides need a model with a tokenizer.json")
        self._ends = sorted(set(lm.generation.eos_token_ids))
        if not self._ends:
            raise ValueError("guides need an end-of-text token, but the model has none")
        from llguidance._tokenizer import TokenizerWrapper

        self._matcher, self._size = llguidance.LLMatcher, lm.config.vocab_size
        whole = llguidance.LLTokenizer(backend.to_str())
        self._tokenizer = llguidance.LLTokenizer(
            TokenizerWrapper(Vocabulary(whole, self._size, self._ends)),
            n_vocab=self._size,
            eos_token=self._ends,
        )

    def json(self) -> "GrammarGuide":
        """Return a guide for any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Json | str) -> "GrammarGuide":
        """Return a guide for JSON that matches a schema, without whitespace between its parts.

        Args:
          schema: the schema, as a dict or as JSON text.

        Raises:
          ValueError: if the schema is invalid or uses unsupported features.
        """
        try:
            text = schema if isinstance(schema, str) else _dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"the schema is not valid JSON: {' '.join(str(error).split())}"
            ) from None
        defaults: Any = {"whitespace_flexible": False}
        compile = functools.partial(self._matcher.grammar_from_json_schema, defaults=defaults)
        return self._guide("schema", text, compile)

    def regex(self, pattern: str) -> "GrammarGuide":
        """Return a guide for texts that a regular expression matches completely. The expression has
        the syntax of Rust's ``regex``.

        Raises:
          ValueError: if the pattern is invalid.
        """
        return self._guide("regex", pattern, self._matcher.grammar_from_regex)

    def grammar(self, lark: str) -> "GrammarGuide":
        """Return a guide for texts that a context-free grammar in Lark's syntax derives from
        ``start``.

        Raises:
          ValueError: if the grammar is invalid.
        """
        return self._guide("grammar", lark, self._matcher.grammar_from_lark)

    def choices(self, texts: Sequence[str]) -> "GrammarGuide":
        """Return a guide for one of a list of texts.

        Raises:
          ValueError: if the list is empty, or ``texts`` is a single string.
        """
        if isinstance(texts, str):
            raise ValueError(f"choices must be a list of strings, got one string: {texts!r:.80}")
        choices = as_list("choices", texts, "a list of strings")
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise ValueError(f"choices must be one or more strings, got {short_repr(texts)}")
        for text in choices:
            check_unicode("a choice", text, "choices")
        rule = " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)
        rule = rule.replace("\x7f", "\\u007f")  # JSON does not escape it, but Lark requires it
        return self.grammar(f"start: {rule}")

    def _guide(self, what: str, text: str, compile: Callable[[str], str]) -> "GrammarGuide":
        if not isinstance(text, str):
            raise ValueError(f"the {what} must be a string, got {short_repr(text)}")
        check_unicode(f"the {what}", text, what)
        try:
            matcher = self._matcher(self._tokenizer, compile(text), log_level=0)
            problem = matcher.get_error()
        except (ValueError, RecursionError) as error:
            problem = str(error)
        if "coerce_one_of" in problem:
            problem = (
                "the alternatives of oneOf may overlap; use anyOf, or give each alternative a "
                "required property with a different const"
            )
        if problem:
            raise ValueError(f"the {what} can't be used: {' '.join(problem.split())}")
        return GrammarGuide(matcher, self._ends, self._size)


def _dumps(schema: object) -> str:
    """Convert a schema to JSON. It may contain numbers and arrays of NumPy and JAX."""

    def convert(value: object) -> object:
        plain = value.tolist() if isinstance(value, np.ndarray | jax.Array) else as_python(value)
        if plain is value:
            raise TypeError(f"{short_repr(value)} can't be written as JSON")
        return plain

    return json.dumps(schema, ensure_ascii=False, allow_nan=False, default=convert)


class GrammarGuide:
    """A ``CopyableGuide`` (see ``kvjax.generation.guides.masks``) for a grammar.

    Attributes:
      ends: tokens that may end the text.
      error: why the grammar could not continue; None if there was no error. After an error, only
        the tokens ``ends`` are allowed.
    """

    def __init__(self, matcher: Any, ends: Sequence[int], vocabulary: int) -> None:
        self.error: str | None = None
        self._matcher, self._ended, self.ends = matcher, False, frozenset(ends)
        words = np.zeros(-(-vocabulary // 32), np.uint32)
        for end in ends:
            words[end // 32] |= np.uint32(1) << np.uint32(end % 32)
        self._only_ends, self._beyond = words, -vocabulary % 32

    def allowed(self) -> np.ndarray:
        """Return the token mask, uint32[words]; see ``kvjax.generation.guides.masks.Guide``."""
        if self._ended or self.error:
            return self._only_ends
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        words = mask[: self._only_ends.size].copy()
        # Clear the bits after the last token.
        words[-1] &= np.uint32(0xFFFFFFFF) >> np.uint32(self._beyond)
        # If the text may end, allow every end token. If no token is allowed, the text must end.
        if self._matcher.is_error() or not words.any():
            self.error = self._why() or "no token may come next"
            return self._only_ends
        return words | self._only_ends if (words & self._only_ends).any() else words

    def copy(self) -> "GrammarGuide":
        """Return an independent copy in the same state."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def accept(self, token: int) -> None:
        """Advance the guide past a token."""
        if token in self.ends and (self.error or self._matcher.is_accepting()):
            self._ended = True
        elif not self._ended and not self.error and not self._matcher.consume_token(token):
            self.error = self._why()

    def _why(self) -> str:
        """Return llguidance's error message, without the state that it prints."""
        return " ".join(self._matcher.get_error().partition("<state>")[0].split())


class Vocabulary:
    """A model's vocabulary in the form that llguidance requires.

    llguidance calls it to tokenize a text that the grammar requires. Names of special tokens in the
    text become ordinary tokens, because a special token has no text and may end a generation.

    Attributes:
      tokens: the bytes of each token for which the model has a logit; b"" for tokens that the
        tokenizer does not know.
      special_token_ids: the special tokens.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, size: int, ends: Sequence[int]) -> None:
        """Create a vocabulary.

        Args:
          tokenizer: an ``LLTokenizer`` of the whole tokenizer.
          size: the number of tokens for which the model has logits.
          ends: end-of-text tokens.
        """
        self._tokenizer, self._size, self.eos_token_id = tokenizer, size, ends[0]
        known = range(min(size, tokenizer.vocab_size))
        self.tokens = [tokenizer.decode_bytes([token]) for token in known]
        self.tokens += [b""] * (size - len(self.tokens))
        self.special_token_ids = [x for x in known if tokenizer.is_special_token(x) or x in ends]
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text with ordinary tokens."""
        if not isinstance(text, str):
            raise TypeError("a vocabulary splits str, not bytes")
        split, encoded = self._tokenizer.tokenize_str(text), text.encode()
        if b"".join(self._tokenizer.decode_bytes([token]) for token in split) != encoded:
            # The tokenizer has normalized the text: "▁" becomes a space, and "ﬁ" becomes two
            # letters.
            return self._spell(encoded)
        tokens: list[int] = []
        for token in split:
            ordinary = token < self._size and token not in self._special
            tokens += [token] if ordinary else self._spell(self._tokenizer.decode_bytes([token]))
        return tokens

    def _spell(self, text: bytes) -> list[int]:
        """Tokenize bytes greedily with the longest ordinary tokens, as far as possible."""
        tokens, start = [], 0
        while start < len(text):
            for stop in range(min(len(text), start + self._longest), start, -1):
                if (token := self._ordinary.get(text[start:stop])) is not None:
                    tokens.append(token)
                    start = stop
                    break
            else:
                break
        return tokens

    @cached_property
    def _ordinary(self) -> dict[bytes, int]:
        ordinary = (pair for pair in enumerate(self.tokens) if pair[0] not in self._special)
        return {text: token for token, text in ordinary if text}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ordinary), default=0)
