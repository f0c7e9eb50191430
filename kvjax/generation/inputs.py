"""Check and convert the prompts, seeds, stop strings and other inputs of a request."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.core.validation import as_int, as_list, as_python, check_unicode, short_repr
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import ModelConfig
from kvjax.sampling.scores import MAX_LOGPROBS

Prompts = str | Sequence[str] | Sequence[Sequence[int]]

_PROMPTS = "prompts are a text, a list of texts, or a list of lists of token ids"


def tokenize_prompts(
    lm: LanguageModel, prompts: Prompts, held: Sequence[int], *, what: str = "prompt"
) -> list[list[int]]:
    """Token ids of each prompt, or of ``what`` else; ``held``: tokens that the rows of a given
    cache hold already."""
    try:
        entries = [prompts] if isinstance(prompts, str) else list(prompts)
    except TypeError:
        raise ValueError(f"{_PROMPTS}, got {short_repr(prompts)}") from None
    if not entries:
        raise ValueError("no prompts: the list is empty")
    rows = []
    for number, entry in enumerate(entries):
        if isinstance(entry, str):
            if lm.tokenizer is None:
                raise ValueError("the model has no tokenizer: give prompts as lists of token ids")
            # Where a row holds tokens already, a second BOS token would stand inside its text.
            begun = number < len(held) and held[number] > 0
            ids = lm.tokenizer.encode(entry, add_special_tokens=not begun)
        else:
            ids = _ints(entry, f"{what} {number}")
        if not ids:
            raise ValueError(f"{what} {number} is empty: there is no token to continue from")
        check_token_ids(lm.config, ids, f"{what} {number}")
        rows.append(ids)
    return rows


def _ints(entry: Any, which: str) -> list[int]:
    try:
        ids = np.asarray(entry)
    except (TypeError, ValueError):  # a list of uneven lists; what can't be looked at
        ids = np.asarray(None)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        wanted = "must be a text or a list of token ids"
        raise ValueError(f"{which} {wanted}, got {short_repr(entry)}: {_PROMPTS}")
    return ids.tolist()


def check_token_ids(config: ModelConfig, ids: Sequence[int], where: str) -> None:
    """Raise ``ValueError`` for a token that the model has not."""
    for i in ids:
        if not 0 <= i < config.vocab_size:
            raise ValueError(
                f"{where}: token id {i} is out of range: the vocabulary has {config.vocab_size} "
                f"tokens, 0 to {config.vocab_size - 1}"
            )


def parse_logit_bias(
    config: ModelConfig, logit_bias: Mapping[int, float] | None
) -> dict[int, float]:
    """What is added to the logits of which tokens."""
    if not isinstance(logit_bias, Mapping | None):
        raise ValueError(f"logit_bias must map token ids to numbers, got {short_repr(logit_bias)}")
    given = logit_bias or {}
    found = {as_int("a token of logit_bias", i, 0): bias for i, bias in given.items()}
    check_token_ids(config, list(found), "logit_bias")
    return found


def parse_logprobs(
    config: ModelConfig, logprobs: int | bool | None, *, name: str = "logprobs"
) -> int | None:
    """How many of the likeliest tokens to report with each token; None for no log-probability."""
    logprobs = as_python(logprobs)
    if logprobs is None or logprobs is False:
        return None
    logprobs = 0 if logprobs is True else logprobs
    most = as_int(name, logprobs, 0)
    if most > MAX_LOGPROBS:
        raise ValueError(f"{name} is {logprobs}, and must be at most {MAX_LOGPROBS}")
    return min(most, config.vocab_size)


def parse_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """A seed for each row."""
    seed = as_python(seed)
    if isinstance(seed, int):
        return [seed + row for row in range(rows)]
    each = as_list("seed", seed, "a whole number, or one a prompt")
    if len(each) != rows:
        raise ValueError(f"{len(each)} seeds for {rows} prompts: give one number, or one a prompt")
    return [as_python(one) for one in each]


def parse_eos_token_ids(lm: LanguageModel, given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Tokens after which a row ends: those given, or else the checkpoint's."""
    if given is None:
        return tuple(lm.generation.eos_token_ids)
    tokens: Any = as_python(given)
    wanted = "a token id, or a list of them"
    each = (tokens,) if isinstance(tokens, int) else as_list("eos_token_ids", tokens, wanted)
    found = tuple(as_int("a token of eos_token_ids", token, 0) for token in each)
    check_token_ids(lm.config, found, "eos_token_ids")
    return found


def parse_stop(lm: LanguageModel, stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The strings before which a text ends."""
    some = () if stop is None else stop
    stops = (some,) if isinstance(some, str) else tuple(as_list("stop", some, "a text, or some"))
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"a stop string must have at least one character, got {short_repr(text)}"
            )
        check_unicode("a stop string", text)
    if stops and lm.tokenizer is None:
        raise ValueError("the model has no tokenizer, so there is no text to find stop strings in")
    return stops
