"""Parsing of the body of a request."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from kvjax.engine.request import RequestParams
from kvjax.generation.guides.grammars import Guides
from kvjax.generation.guides.masks import Guide
from kvjax.sampling.params import PARAMS
from kvjax.serve.json_body import APIError, Fields, JsonObject, is_number, parse_object
from kvjax.serve.logprobs import Echo, ScoredToken

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
"""The maximum number of stop strings of a request, and of characters of each. The text is searched
for every stop string after each token."""
_SEEDS = 2**64
_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Fields that do not affect the generated text."""

MakeGuide = Callable[[Guides], Guide]


@dataclass(kw_only=True)
class ParsedRequest:
    """A parsed request.

    Attributes:
      prompts: the token ids of each prompt.
      max_tokens: maximum number of new tokens of each choice; 0 to return only the echoed prompt.
      n: number of choices per prompt.
      samples: number of sequences that are drawn per prompt. The best ``n`` are returned.
      beam_width: number of beams of each sample; 1 for no beam search.
      seed: the seed of the first sample of each prompt. It increases by 1 for each further sample.
      settings: engine settings of all samples.
      guides: the grammar constraint of each sample.
      stream: whether to send server-sent events.
      include_usage: whether the last event has the usage.
      logprobs: whether to return log-probabilities.
      echoes: the prompts to repeat in the choices; empty to repeat none.
    """

    prompts: list[list[int]]
    max_tokens: int
    n: int = 1
    samples: int = 1
    beam_width: int = 1
    seed: int = 0
    settings: RequestParams = field(default_factory=RequestParams)
    guides: list[Guide | None] = field(default_factory=list)
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    echoes: list[Echo] = field(default_factory=list)

    @property
    def num_sequences(self) -> int:
        """The number of samples, or of beams of all samples, over all prompts."""
        return self.samples * self.beam_width * len(self.prompts)

    def engine_requests(self, tenant: str | None) -> list[tuple[list[int], RequestParams]]:
        """Return the prompt and the engine settings of each sample.

        Only requests with the same ``tenant`` share cached prefixes.
        """
        requests = []
        for index in range(self.samples * len(self.prompts)):
            settings: RequestParams = {
                **self.settings,
                "max_new_tokens": max(self.max_tokens, 1),
                "seed": (self.seed + index % self.samples) % _SEEDS,
                "guide": self.guides[index],
                "tenant": tenant,
            }
            requests.append((self.prompts[index // self.samples], settings))
        return requests


class EndpointSchema(Protocol):
    """The part of an endpoint that differs between endpoints: the fields of requests, and the form
    of choices.

    ``prompt_field`` is the field with the prompts. ``id_prefix`` is the prefix of response ids.
    ``response_type`` and ``chunk_type`` are the values of the field ``object`` in a response and in
    a streamed chunk.
    """

    prompt_field: str
    id_prefix: str
    response_type: str
    chunk_type: str

    def parse(self, fields: Fields) -> ParsedRequest:
        """Read the fields that only this endpoint has."""
        ...

    def choice(
        self, index: int, text: str, scored: list[ScoredToken] | None, finish_reason: str
    ) -> JsonObject:
        """Return a finished choice. ``scored`` has its tokens, if log-probabilities were
        requested."""
        ...

    def first_chunk(self, index: int) -> JsonObject | None:
        """Return the chunk that a stream sends before the text of a choice, or None."""
        ...

    def chunk(
        self, index: int, text: str, scored: list[ScoredToken] | None, finish_reason: str | None
    ) -> JsonObject:
        """Return a chunk of a choice. ``finish_reason`` is None if more chunks follow."""
        ...


def parse_request(
    body: bytes,
    schema: EndpointSchema,
    *,
    model: str,
    max_sequences: int,
    guides: Callable[[], Guides],
) -> ParsedRequest:
    """Parse the body of a request.

    Args:
      body: the body.
      schema: parses the fields that only this endpoint has.
      model: the name of the served model.
      max_sequences: the maximum number of samples or beams, over all prompts.
      guides: returns the grammar compiler. It is called only if the request has a grammar.

    Raises:
      APIError: if a field is wrong. The error names it.
    """
    fields = Fields(parse_object(body))
    if fields.text("model") not in (None, model):
        message = f"no such model: this server has {model!r}"
        raise APIError(404, message, param="model", code="model_not_found")
    request = schema.parse(fields)
    _parse_counts(fields, request, max_sequences)
    _parse_stream(fields, request)
    _parse_sampling(fields, request)
    constraint = _parse_constraint(fields)
    ends_late = request.settings.get("min_new_tokens") or "eos_token_ids" in request.settings
    if constraint is not None and ends_late:
        name = constraint[0]
        message = f"{name} can't be combined with min_tokens or ignore_eos"
        raise APIError(400, message, param=name)
    fields.reject_unknown()
    request.guides = _make_guides(constraint, request.samples * len(request.prompts), guides)
    if request.stream and (request.samples > request.n or request.beam_width > 1):
        name = "best_of" if request.beam_width == 1 else "use_beam_search"
        message = f"{name} can't be streamed: the best texts are known only at the end"
        raise APIError(400, message, param=name)
    return request


def _parse_counts(fields: Fields, request: ParsedRequest, max_sequences: int) -> None:
    """Read the number of choices, the number of samples from which they are chosen, and the
    settings of a beam search."""
    request.n = fields.integer("n", 1) or 1
    best_of = fields.integer("best_of", 1)
    if best_of is not None and best_of < request.n:
        message = f"best_of is {best_of}, but must be at least n, which is {request.n}"
        raise APIError(400, message, param="best_of")
    name, count = ("n", request.n) if best_of in (None, request.n) else ("best_of", best_of)
    beam_width, length_penalty = fields.integer("beam_width", 1), fields.number("length_penalty")
    early_stopping = fields.raw("early_stopping")
    if fields.flag("use_beam_search"):
        if beam_width is None:
            request.beam_width = count
        else:
            name, request.beam_width = "beam_width", beam_width
        _set_beam_search(request, length_penalty, early_stopping)
    else:
        defaults = (
            ("beam_width", beam_width, 1),
            ("length_penalty", length_penalty, 1),
            ("early_stopping", early_stopping, 0),
        )
        for option, value, default in defaults:
            if value not in (None, default):
                raise APIError(400, f"{option} needs use_beam_search: true", param=option)
        request.samples = count
    if request.num_sequences > max_sequences:
        message = (
            f"{name} makes {request.num_sequences} sequences; this server accepts {max_sequences}"
        )
        raise APIError(400, message, param=name)


def _set_beam_search(
    request: ParsedRequest, length_penalty: float | None, early_stopping: Any
) -> None:
    least = max(request.n, 2)
    if request.beam_width < least:
        message = f"a beam search with n={request.n} needs a beam_width of at least {least}"
        raise APIError(400, message, param="beam_width")
    request.settings["num_beams"], request.settings["n"] = request.beam_width, request.n
    request.settings["length_penalty"] = 1.0 if length_penalty is None else length_penalty
    request.settings["early_stopping"] = False if early_stopping is None else early_stopping


def _parse_stream(fields: Fields, request: ParsedRequest) -> None:
    request.stream = fields.flag("stream")
    options = fields.nested("stream_options")
    if options is None:
        return
    if not request.stream:
        raise APIError(400, "stream_options needs stream: true", param="stream_options")
    request.include_usage = options.flag("include_usage")
    options.ignore("include_obfuscation")
    options.reject_unknown()


def _parse_sampling(fields: Fields, request: ParsedRequest) -> None:
    """Read the sampling parameters, which all endpoints share."""
    fields.ignore(*_IGNORED)
    seed = fields.integer("seed", -(2**63), _SEEDS - 1)
    request.seed = secrets.randbits(64) if seed is None else seed % _SEEDS
    settings = request.settings
    request.logprobs = "logprobs" in settings
    if request.samples > request.n:
        settings.setdefault("logprobs", 0)  # the best samples are chosen by their scores
    # The engine checks the ranges. ``min_new_tokens`` has a different name here.
    given = {name: fields.number(name) for name in PARAMS if name != "min_new_tokens"}
    if given["top_k"] in (0, -1):
        given["top_k"] = None
    if given["temperature"] is None:
        given["temperature"] = 1.0 if request.beam_width == 1 else 0.0
    settings |= cast(RequestParams, {k: x for k, x in given.items() if x is not None})
    settings["logit_bias"] = _parse_logit_bias(fields)
    engine_draft = fields.flag("draft", True)
    settings["draft"] = (
        "lookup" if fields.flag("prompt_lookup") else "engine" if engine_draft else None
    )
    settings["stop"] = _parse_stop(fields)
    settings["min_new_tokens"] = fields.integer("min_tokens", 0, request.max_tokens) or 0
    if fields.flag("ignore_eos"):
        settings["eos_token_ids"] = ()


def _parse_stop(fields: Fields) -> list[str]:
    value = fields.raw("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    strings = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    if not strings or len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        expected = f"up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters"
        raise fields.error("stop", expected, value)
    return stops


def _parse_logit_bias(fields: Fields) -> dict[int, float]:
    value = fields.raw("logit_bias")
    expected = "an object of token ids and numbers from -100 to 100"
    if not isinstance(value, dict | None):
        raise fields.error("logit_bias", expected, value)
    for token, bias in (value or {}).items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise fields.error("logit_bias", expected, token)
        if not is_number(bias) or abs(bias) > 100:
            raise fields.error("logit_bias", expected, bias)
    return {int(token): float(bias) for token, bias in (value or {}).items()}


def _parse_constraint(fields: Fields) -> tuple[str, MakeGuide] | None:
    """Return the field that constrains the text to a grammar, and a function that makes the guide;
    None without a constraint."""
    response_format = fields.nested("response_format")
    structured_outputs = fields.nested("structured_outputs")
    make_guide = None if response_format is None else _parse_response_format(response_format)
    if structured_outputs is None:
        return None if make_guide is None else ("response_format", make_guide)
    makers: dict[str, Callable[[Guides, Any], Guide]] = {
        "json": Guides.json_schema,
        "regex": Guides.regex,
        "grammar": Guides.grammar,
        "choice": Guides.choices,
    }
    values = {name: x for name in makers if (x := structured_outputs.raw(name)) is not None}
    structured_outputs.reject_unknown()
    if make_guide is not None or len(values) != 1:
        message = (
            f"structured_outputs must have exactly one of {', '.join(makers)}, and can't be "
            "combined with response_format"
        )
        raise APIError(400, message, param="structured_outputs")
    ((name, value),) = values.items()
    if not isinstance(value, {"json": dict | str, "choice": list}.get(name, str)):
        field = f"structured_outputs.{name}"
        raise APIError(400, f"{field} has a wrong type", param=field)
    return "structured_outputs", lambda guides: makers[name](guides, value)


def _parse_response_format(fields: Fields) -> MakeGuide | None:
    """Return a function that makes the guide of a ``response_format``; None for plain text."""
    kind = fields.text("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise fields.error("type", "text, json_object or json_schema", kind)
    json_schema = fields.nested("json_schema") if kind == "json_schema" else None
    fields.reject_unknown()
    if kind != "json_schema":
        return Guides.json if kind == "json_object" else None
    schema = None if json_schema is None else json_schema.raw("schema")
    if json_schema is None or not isinstance(schema, dict):
        raise fields.error("json_schema", "an object with a schema", schema)
    json_schema.ignore("name", "description", "strict")
    json_schema.reject_unknown()
    return lambda guides: guides.json_schema(schema)


def _make_guides(
    constraint: tuple[str, MakeGuide] | None, count: int, guides: Callable[[], Guides]
) -> list[Guide | None]:
    """Make a guide for each sample."""
    if constraint is None:
        return [None] * count
    name, make_guide = constraint
    try:
        return [make_guide(guides()) for _ in range(count)]
    except ValueError as error:
        raise APIError(400, f"{name}: {error}", param=name) from None
