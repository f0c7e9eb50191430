"""Guides: texts that keep to a grammar, by llguidance, where it is installed."""

import copy
import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from kvjax.core.validation import as_list, as_python, check_unicode, short_repr
from kvjax.generation.loaded_model import LanguageModel


class Vocabulary:
    """Tokens of a tokenizer, as many as the model has logits for.

    llguidance asks it how a text that must come is split into tokens. The names of special tokens
    are spelled with ordinary tokens there: a special token has no text, and may end a generation.

    ``tokens``: the bytes of each, none of those that the tokenizer does not know;
    ``special_token_ids``: those that are special.
    """

    bos_token_id = None

    def __init__(self, whole: Any, size: int, ends: Sequence[int]) -> None:
        """``whole``: llguidance's own reading of the tokenizer; ``size``: how many tokens the model
        has; ``ends``: tokens that end a text."""
        self._whole, self._size, self.eos_token_id = whole, size, ends[0]
        known = range(min(size, whole.vocab_size))
        self.tokens = [whole.decode_bytes([token]) for token in known]
        self.tokens += [b""] * (size - len(self.tokens))
        self.special_token_ids = [x for x in known if whole.is_special_token(x) or x in ends]
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """The ordinary tokens of a text."""
        if not isinstance(text, str):
            raise TypeError("a vocabulary splits str, not bytes")
        split, whole = self._whole.tokenize_str(text), text.encode()
        if b"".join(self._whole.decode_bytes([token]) for token in split) != whole:
            return self._spelled(whole)  # the tokenizer changes it: ▁ is a space, ﬁ two letters
        found: list[int] = []
        for token in split:
            usual = token < self._size and token not in self._special
            found += [token] if usual else self._spelled(self._whole.decode_bytes([token]))
        return found

    def _spelled(self, text: bytes) -> list[int]:
        """Bytes by the longest ordinary tokens, as far as there are any."""
        found, start = [], 0
        while start < len(text):
            for stop in range(min(len(text), start + self._longest), start, -1):
                if (token := self._ordinary.get(text[start:stop])) is not None:
                    found.append(token)
                    start = stop
                    break
            else:
                break
        return found

    @cached_property
    def _ordinary(self) -> dict[bytes, int]:
        usual = (pair for pair in enumerate(self.tokens) if pair[0] not in self._special)
        return {text: token for token, text in usual if text}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ordinary), default=0)


class Guides:
    """Makes guides for a model; what all share is made once.

    ::

        guides = kvjax.Guides(lm)
        point = guides.json_schema({"type": "object", ...})
        kvjax.generate(lm, ["A point: ", "Another: "], guide=point)
        engine.submit("A point: ", guide=point.copy())

    ``generate`` copies what it is given; an engine goes along a guide as it is, so each request has
    one of its own. Where its grammar is at an end, only tokens that end a text are left.

    Raises:
      ValueError: if llguidance is not installed, or the model has no tokenizer of its kind, or no
        token that ends a text.
    """

    def __init__(self, lm: LanguageModel) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise ValueError('a guide needs llguidance: pip install "kvjax[guided]" installs it')
        import llguidance

        backend: Any = getattr(lm.tokenizer, "backend", None)
        if not hasattr(backend, "to_str"):
            raise ValueError("a guide needs a model with a tokenizer.json")
        self._ends = sorted(set(lm.generation.eos_token_ids))
        if not self._ends:
            raise ValueError("a guide needs a model with a token that ends a text, this has none")
        from llguidance._tokenizer import TokenizerWrapper

        self._matcher, self._size = llguidance.LLMatcher, lm.config.vocab_size
        whole = llguidance.LLTokenizer(backend.to_str())
        self._tokenizer = llguidance.LLTokenizer(
            TokenizerWrapper(Vocabulary(whole, self._size, self._ends)),
            n_vocab=self._size,
            eos_token=self._ends,
        )

    def json(self) -> "GrammarGuide":
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Any) -> "GrammarGuide":
        """JSON as a schema says, a dict or its text, without any space between its parts.

        Raises:
          ValueError: if it is no schema, or says what can't be kept to.
        """

        try:
            text = schema if isinstance(schema, str) else _dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the schema is no JSON: {' '.join(str(error).split())}") from None
        spaces: Any = {"whitespace_flexible": False}
        make = functools.partial(self._matcher.grammar_from_json_schema, defaults=spaces)
        return self._guide("schema", text, make)

    def regex(self, pattern: str) -> "GrammarGuide":
        """What a regular expression of Rust's matches, from end to end.

        Raises:
          ValueError: if it is none.
        """
        return self._guide("regex", pattern, self._matcher.grammar_from_regex)

    def grammar(self, lark: str) -> "GrammarGuide":
        """A context-free grammar as of Lark, from ``start`` on.

        Raises:
          ValueError: if it is none.
        """
        return self._guide("grammar", lark, self._matcher.grammar_from_lark)

    def choices(self, texts: Sequence[str]) -> "GrammarGuide":
        """One of a list of texts.

        Raises:
          ValueError: if there is none, or ``texts`` is itself a text.
        """
        if isinstance(texts, str):
            raise ValueError(f"choices must be a list of texts, got the text {texts!r:.80}")
        some = as_list("choices", texts, "a list of texts")
        if not some or not all(isinstance(text, str) and text for text in some):
            raise ValueError(f"choices must be texts, one at least, got {short_repr(texts)}")
        for text in some:
            check_unicode("a choice", text)
        rule = " | ".join(json.dumps(text, ensure_ascii=False) for text in some)
        rule = rule.replace("\x7f", "\\u007f")  # which JSON leaves as it is, and Lark refuses
        return self.grammar(f"start: {rule}")

    def _guide(self, what: str, text: str, make: Callable[[str], str]) -> "GrammarGuide":
        if not isinstance(text, str):
            raise ValueError(f"the {what} must be a text, got {short_repr(text)}")
        check_unicode(f"the {what}", text)
        try:
            matcher = self._matcher(self._tokenizer, make(text), log_level=0)
            problem = matcher.get_error()
        except (ValueError, RecursionError) as error:
            problem = str(error)
        if "coerce_one_of" in problem:
            problem = (
                "alternatives of oneOf may overlap; write anyOf, or give each a required "
                "property with a const of its own"
            )
        if problem:
            raise ValueError(f"the {what} can't be kept to: {' '.join(problem.split())}")
        return GrammarGuide(matcher, self._ends, self._size)


def _dumps(schema: Any) -> str:
    """A schema as JSON; numbers may be those of NumPy and JAX."""

    def as_plain(value: Any) -> Any:
        found = value.tolist() if isinstance(value, np.ndarray | jax.Array) else as_python(value)
        if found is value:
            raise TypeError(f"{short_repr(value)} has no place there")
        return found

    return json.dumps(schema, ensure_ascii=False, allow_nan=False, default=as_plain)


class GrammarGuide:
    """A ``Guide`` (see ``kvjax.generation.guides.masks``) along a grammar; ``ends``: tokens that
    may end its text; ``error``: why it could not go on, in which case only these are allowed."""

    def __init__(self, matcher: Any, ends: Sequence[int], vocabulary: int) -> None:
        self.error: str | None = None
        self._matcher, self._ended, self.ends = matcher, False, frozenset(ends)
        words = np.zeros(-(-vocabulary // 32), np.uint32)
        for end in ends:
            words[end // 32] |= np.uint32(1) << np.uint32(end % 32)
        self._only_ends, self._beyond = words, -vocabulary % 32

    def allowed(self) -> np.ndarray:
        """uint32[words]: see ``kvjax.generation.guides.masks.Guide``."""
        if self._ended or self.error:
            return self._only_ends
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        words = mask[: self._only_ends.size].copy()
        # Bits behind the last token are none's.
        words[-1] &= np.uint32(0xFFFFFFFF) >> np.uint32(self._beyond)
        # Where nothing may come, and where the text may end, all ends are alike.
        if self._matcher.is_error() or not words.any():
            self.error = self._why() or "no token may come next"
            return self._only_ends
        return words | self._only_ends if (words & self._only_ends).any() else words

    def copy(self) -> "GrammarGuide":
        """The same, as far as it has come; what either accepts is not known to the other."""
        found = copy.copy(self)
        found._matcher = self._matcher.deep_copy()
        return found

    def accept(self, token: int) -> None:
        """A token has come."""
        if token in self.ends and (self.error or self._matcher.is_accepting()):
            self._ended = True
        elif not self._ended and not self.error and not self._matcher.consume_token(token):
            self.error = self._why()

    def _why(self) -> str:
        """What llguidance says, but for its state."""
        return " ".join(self._matcher.get_error().partition("<state>")[0].split())
