"""What a request asks for, apart from its prompts: fields that all endpoints have in common."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvjax.engine.request import RequestParams
from kvjax.generation.guides.grammars import Guides
from kvjax.generation.guides.masks import Guide
from kvjax.serve.echoes import Echo
from kvjax.serve.errors import Refused
from kvjax.serve.fields import Fields, is_number

MOST_STOPS, LONGEST_STOP = 16, 256
"""Stop strings of a request, and characters of each: all are looked for behind every token."""
_SEEDS = 2**64
_UNUSED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip
"""Fields that change no text."""


@dataclass(kw_only=True)
class Asked:
    """A request that was read.

    ``prompts``: token ids; ``n``: choices of each that are given back, the best of ``samples``, or
    of a search of so many ``beams``, which is one sample; ``limit``: new tokens; ``settings``: of
    all; ``seed``: of the first sample of each prompt, the others go on from it; ``guides``: of each
    sample; ``stream``, ``usage``: whether it is answered piece by piece, and usage at its end;
    ``told``: whether log-probabilities are; ``echoes``: of each prompt, which its choices begin
    with; none where they do not. Of a ``limit`` of 0 nothing but these is given back.
    """

    prompts: list[list[int]]
    limit: int
    n: int = 1
    samples: int = 1
    beams: int = 1
    seed: int = 0
    settings: RequestParams = field(default_factory=RequestParams)
    guides: list[Guide | None] = field(default_factory=list)
    stream: bool = False
    usage: bool = False
    told: bool = False
    echoes: list[Echo] = field(default_factory=list)

    @property
    def places(self) -> int:
        """Samples and beams of all prompts."""
        return self.samples * self.beams * len(self.prompts)

    def each(self, tenant: str | None) -> list[tuple[list[int], RequestParams]]:
        """Each sample's prompt and settings; ``tenant``: whose prefixes they share."""
        found = []
        for at in range(self.samples * len(self.prompts)):
            mine: RequestParams = {
                **self.settings, "max_new_tokens": max(self.limit, 1),
                "seed": (self.seed + at % self.samples) % _SEEDS, "guide": self.guides[at],
                "tenant": tenant,
            }  # fmt: skip
            found.append((self.prompts[at // self.samples], mine))
        return found


def read_common(fields: Fields, guides: Callable[[], Guides], asked: Asked) -> None:
    """Take the fields that all endpoints have, and refuse those that none has; how many texts there
    are is known by now.

    Raises:
      Refused: naming the field.
    """
    fields.drop(*_UNUSED)
    seed = fields.whole("seed", -(2**63), _SEEDS - 1)
    asked.seed = secrets.randbits(64) if seed is None else seed % _SEEDS
    asked.stream = fields.flag("stream")
    options = fields.inner("stream_options")
    if options is not None:
        if not asked.stream:
            raise Refused(400, "stream_options is for stream: true", param="stream_options")
        asked.usage = options.flag("include_usage")
        options.drop("include_obfuscation")
        options.end()
    asked.told = "logprobs" in asked.settings
    if asked.samples > asked.n:
        asked.settings.setdefault("logprobs", 0)
    settings, temperature = asked.settings, fields.number("temperature")
    default = 1.0 if asked.beams == 1 else 0.0
    settings["temperature"] = default if temperature is None else temperature
    top_k = fields.whole("top_k", -1)
    settings["top_k"] = top_k if top_k is not None and top_k > 0 else None
    settings["top_p"], settings["min_p"] = fields.number("top_p"), fields.number("min_p")
    settings["typical_p"] = fields.number("typical_p")
    settings["repetition_penalty"] = fields.number("repetition_penalty")
    settings["frequency_penalty"] = fields.number("frequency_penalty")
    settings["presence_penalty"] = fields.number("presence_penalty")
    settings["no_repeat_ngram_size"] = fields.whole("no_repeat_ngram_size", 0)
    settings["logit_bias"] = _bias(fields)
    drafted = fields.flag("draft", True)
    settings["draft"] = "lookup" if fields.flag("lookup") else "engine" if drafted else None
    settings["stop"] = _stops(fields)
    least = fields.whole("min_tokens", 0, asked.limit) or 0
    endless = fields.flag("ignore_eos")
    settings["min_new_tokens"] = least
    if endless:
        settings["eos_token_ids"] = ()
    kind, grammar = _grammar(fields)
    if kind is not None and (least or endless):
        raise Refused(400, f"min_tokens and ignore_eos can't stand beside {kind}", param=kind)
    fields.end()
    asked.guides = [None] * (asked.samples * len(asked.prompts))
    if kind is not None:
        try:
            asked.guides = [grammar(guides()) for _ in asked.guides]
        except ValueError as error:
            raise Refused(400, f"{kind}: {error}", param=kind) from None


def _stops(fields: Fields) -> list[str]:
    value = fields.raw("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    texts = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    if not texts or len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        wanted = f"a text, or up to {MOST_STOPS} of them, each of 1 to {LONGEST_STOP} characters"
        raise fields.wrong("stop", wanted, value)
    return stops


def _bias(fields: Fields) -> dict[int, float]:
    value = fields.raw("logit_bias")
    wanted = "an object of token ids, and numbers from -100 to 100"
    if not isinstance(value, dict | None):
        raise fields.wrong("logit_bias", wanted, value)
    for token, bias in (value or {}).items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise fields.wrong("logit_bias", wanted, token)
        if not is_number(bias) or abs(bias) > 100:
            raise fields.wrong("logit_bias", wanted, bias)
    return {int(token): float(bias) for token, bias in (value or {}).items()}


def _grammar(fields: Fields) -> tuple[str | None, Callable[[Guides], Guide]]:
    """What a text must keep to: the field that says so, None for nothing, and how a guide is
    made."""
    form, other = fields.inner("response_format"), fields.inner("structured_outputs")
    found: tuple[str | None, Any] = (None, None)
    if form is not None:
        found = "response_format", _of_format(form)
    if other is not None:
        ways: dict[str, Any] = {
            "json": Guides.json_schema, "regex": Guides.regex, "grammar": Guides.grammar,
            "choice": Guides.choices,
        }  # fmt: skip
        given = {name: value for name in ways if (value := other.raw(name)) is not None}
        other.end()
        if found[1] is not None or len(given) != 1:
            message = f"structured_outputs must have one of {', '.join(ways)}, and stand alone"
            raise Refused(400, message, param="structured_outputs")
        ((name, value),) = given.items()
        if not isinstance(value, {"json": dict | str, "choice": list}.get(name, str)):
            raise Refused(400, f"structured_outputs.{name} has a wrong type", param=name)
        found = "structured_outputs", lambda guides: ways[name](guides, value)
    return found if found[1] is not None else (None, Guides.json)


def _of_format(form: Fields) -> Any:
    """How ``response_format`` makes a guide; None where it makes none."""
    kind = form.text("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise form.wrong("type", "text, json_object or json_schema", kind)
    inner = form.inner("json_schema") if kind == "json_schema" else None
    form.end()
    if kind != "json_schema":
        return Guides.json if kind == "json_object" else None
    schema = None if inner is None else inner.raw("schema")
    if inner is None or not isinstance(schema, dict):
        raise form.wrong("json_schema", "an object with a schema", schema)
    inner.drop("name", "description", "strict")
    inner.end()
    return lambda guides: guides.json_schema(schema)
