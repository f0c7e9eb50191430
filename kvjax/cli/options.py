"""Options that several commands share, alone or in groups.

A group is a dataclass whose fields are options. A command has one parameter for the group, and
``as_command`` replaces this parameter by the options.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from jax.sharding import Mesh as JaxMesh

from kvjax.cli.common import read_text
from kvjax.core.array_folder import expand_user
from kvjax.engine.engine import Engine
from kvjax.generation.guides.grammars import Guides
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.results import GenerationResult
from kvjax.memory.limits import InferenceLimits
from kvjax.memory.shapes import SHAPES
from kvjax.policies.presets import PolicyChoice, parse_policy
from kvjax.sampling.params import PARAMS, SamplingKeywords, SamplingParams

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="A folder, a GGUF file or a hub id; by default the embedded model."
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub id; by default its main branch.")
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16; by default the best one for the device."),
]
Cache = Annotated[
    str,
    typer.Option(
        help="The cache policy, as NAME or NAME,SETTING=VALUE,...: static, dynamic, "
        "sliding_window, hybrid, quantized, offloaded, offloaded_static, auto or paged."
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(help="Add to a token's logit: TOKEN=NUMBER, such as 13=-100; may be repeated."),
]
Stop = Annotated[
    list[str] | None, typer.Option(help="End the text before this string; may be repeated.")
]
RotaryLen = Annotated[
    int | None,
    typer.Option(
        help="The text length for which longrope and dynamic rotary frequencies are computed; by "
        "default what the cache can hold.",
        min=1,
    ),
]
Mesh = Annotated[
    str,
    typer.Option(
        help="Devices that share the work: data=2,tensor=2,sequence=2. By default (auto) a model "
        "that does not fit one device is divided among the local devices; with --distributed, "
        "every model is divided among all devices.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
KnownShape = Annotated[str | None, typer.Option(help=f"A well-known shape: {', '.join(SHAPES)}.")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model to load."""

    model: Model = None
    revision: Revision = None
    dtype: Dtype = None

    def load(self, mesh: JaxMesh | Literal["auto"] | None = "auto") -> LanguageModel:
        """Load the model."""
        from kvjax import models

        return models.load(self.model, dtype=self.dtype, revision=self.revision, mesh=mesh)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How the cache is quantized."""

    kv_bits: Annotated[
        int | None, typer.Option(help="Quantize the cache: 8, 4, 3, 2 or 1 bits per number.")
    ] = None
    key_bits: Annotated[int | None, typer.Option(help="Bits per number of the keys.")] = None
    value_bits: Annotated[int | None, typer.Option(help="Bits per number of the values.")] = None
    group_size: Annotated[
        int | None, typer.Option(help="Numbers that share a scale; by default 64.")
    ] = None

    def settings(self) -> dict[str, int | None]:
        """Return the options as settings of ``kvjax.policy``."""
        return {
            "bits": self.kv_bits,
            "key_bits": self.key_bits,
            "value_bits": self.value_bits,
            "group_size": self.group_size,
        }


@dataclass(frozen=True, kw_only=True)
class SlidingWindow:
    """Which tokens a sliding window keeps."""

    window: Annotated[
        int | None, typer.Option(help="For sliding_window: the tokens that a layer keeps.")
    ] = None
    sinks: Annotated[
        int | None,
        typer.Option(help="First tokens that sliding_window keeps, or that stay unquantized."),
    ] = None

    def settings(self) -> dict[str, int | None]:
        """Return the options as settings of ``kvjax.policy``."""
        return {"window": self.window, "sinks": self.sinks}


@dataclass(frozen=True, kw_only=True)
class Offloading:
    """How layers are stored on the host."""

    prefetch: Annotated[
        int | None, typer.Option(help="For a cache on the host: layers to fetch ahead.")
    ] = None
    cache_memory: Annotated[
        str | None,
        typer.Option(help="For --cache auto: device memory the cache may take: 8GiB, 500MB."),
    ] = None

    def settings(self) -> dict[str, int | str | None]:
        """Return the options as settings of ``kvjax.policy``."""
        return {"prefetch": self.prefetch, "memory": self.cache_memory}


def cache_policy(
    cache: str, *groups: Quantization | SlidingWindow | Offloading, memory: int | None = None
) -> PolicyChoice:
    """Return the policy of ``--cache`` and the option groups ``groups``, which add settings.

    ``memory`` is the budget of an automatic cache, in bytes.

    Raises:
      ValueError: for the same reasons as ``parse_policy``.
    """
    settings: dict[str, Any] = {"memory": memory}
    for group in groups:
        settings |= group.settings()
    return parse_policy(cache, **settings)


class SamplingOptions(dict[str, float]):
    """The sampling parameters that were given, as keywords of ``kvjax.generate``."""

    keywords: Collection[str] = PARAMS.keys()


class DrawOptions(SamplingOptions):
    """``SamplingOptions`` without the parameters that change logits before the draw."""

    keywords = SamplingKeywords.__annotations__.keys()


def _sampling_option(name: str) -> inspect.Parameter:
    """Return the option for a sampling parameter. The option's value is None if it is not given."""
    default = getattr(SamplingParams, name)
    text = PARAMS[name].help.split(". ")[0].removesuffix(".") + "."
    if default is not None:
        text += f"  [default: {default}]"
    option = typer.Option(help=text)
    hint = get_type_hints(SamplingParams)[name]
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[hint | None, option],
    )


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """The options that choose how tokens are drafted."""

    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            help="A smaller model that drafts tokens: a folder, a GGUF file or a hub id. It does "
            "not change the text.",
        ),
    ] = None
    draft_layers: Annotated[
        int | None, typer.Option(help="Draft with the model's own first layers, this many.")
    ] = None
    prompt_lookup: Annotated[
        bool,
        typer.Option(
            "--prompt-lookup", help="Draft what followed the same tokens earlier in the text."
        ),
    ] = False

    def check(self) -> None:
        """Raise ``ValueError`` if several options are given."""
        _at_most_one(
            {
                "--draft": self.draft,
                "--draft-layers": self.draft_layers,
                "--prompt-lookup": self.prompt_lookup or None,
            }
        )

    @property
    def given(self) -> bool:
        """Whether any of the options was given."""
        return self != Drafting()

    def load(
        self, lm: LanguageModel, mesh: JaxMesh | Literal["auto"] | None, dtype: str | None
    ) -> LanguageModel | str | None:
        """Return the ``draft`` argument of ``kvjax.generate``."""
        from kvjax import models

        if self.prompt_lookup:
            return "lookup"
        if self.draft_layers is not None:
            return models.first_layers(lm, self.draft_layers)
        return None if self.draft is None else models.load(self.draft, dtype=dtype, mesh=mesh)


Grammar = tuple[str, Any]
"""A method of ``Guides``, and its argument."""


@dataclass(frozen=True, kw_only=True)
class GrammarOptions:
    """The grammar that the text must follow."""

    json_schema: Annotated[
        str | None,
        typer.Option(help="Follow a JSON schema: a file, or the schema itself, starting with {."),
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Match a regular expression, in Rust's syntax.")
    ] = None
    choice: Annotated[
        list[str] | None, typer.Option(help="Generate one of these texts; may be repeated.")
    ] = None
    grammar: Annotated[
        Path | None, typer.Option(help="Follow the grammar in this file, in Lark's syntax.")
    ] = None

    def read(self) -> Grammar | None:
        """Return the given grammar, and read its file if it has one; None if no grammar was given.

        Raises:
          ValueError: if several are given, or a file does not exist.
        """
        _at_most_one(
            {
                "--json-schema": self.json_schema,
                "--regex": self.regex,
                "--choice": self.choice or None,
                "--grammar": self.grammar,
            }
        )
        if self.json_schema is not None:
            inline = self.json_schema.lstrip().startswith("{")
            return "json_schema", self.json_schema if inline else _read_file(self.json_schema)
        if self.grammar is not None:
            return "grammar", _read_file(self.grammar)
        if self.choice:
            return "choices", tuple(self.choice)
        return None if self.regex is None else ("regex", self.regex)


def make_guide(lm: LanguageModel, grammar: Grammar | None) -> Any:
    """Return the ``guide`` argument of ``kvjax.generate``."""
    if grammar is None:
        return None
    name, value = grammar
    return getattr(Guides(lm), name)(value)


def check_guides(result: GenerationResult) -> None:
    """Raise ``ValueError`` if a text ended early because its guide failed."""
    for guide in result.guides or ():
        if guide is not None and guide.error is not None:
            raise ValueError(f"the text ends early because its grammar failed: {guide.error}")


def _read_file(file: str | Path) -> str:
    path = expand_user(file)
    if not path.is_file():
        raise ValueError(f"no such file: {str(file)!r:.200}")
    return read_text(path)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The size of an engine."""

    max_batch_size: Annotated[
        int, typer.Option(help="Sequences that are generated at once.", min=1)
    ] = 8
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prompt and its new text; by default the model's positions, at most "
            "4096.",
            min=1,
        ),
    ] = None
    rotary_len: RotaryLen = None
    pages: Annotated[
        int | None,
        typer.Option(help="Pages of each pool; by default what all rows can need.", min=1),
    ] = None
    cache_memory: Annotated[
        str | None,
        typer.Option(help="Instead of --pages: memory that all pools may take: 8GiB, 500MB."),
    ] = None
    prefill_chunk: Annotated[
        int, typer.Option(help="Prompt tokens that are computed together.", min=1)
    ] = 256

    def engine(
        self, lm: LanguageModel, policy: PolicyChoice, default_len: int, **settings: Any
    ) -> Engine:
        """Create an engine of this size.

        Args:
          lm: the model.
          policy: the cache policy.
          default_len: the maximum number of tokens of a sequence, if ``--max-seq-len`` is not
            given.
          settings: further arguments of ``Engine``.
        """
        limits = InferenceLimits(
            max_batch_size=self.max_batch_size, max_seq_len=self.max_seq_len or default_len
        )
        return Engine(
            lm,
            policy,
            limits,
            pages=self.pages,
            memory=self.cache_memory,
            prefill_chunk=self.prefill_chunk,
            rotary_len=self.rotary_len,
            **settings,
        )


def _at_most_one(options: dict[str, object]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]} exclude each other: give one of them")


def as_command(command: Callable[..., None]) -> Callable[..., None]:
    """Make a function for typer that has the options of a command's groups as parameters.

    The function also expands ``~`` in paths, because shells don't expand it in ``--out=~/results``.
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group = parameter.annotation
        if isinstance(group, type) and issubclass(group, SamplingOptions):
            own = [_sampling_option(name) for name in group.keywords]
        elif dataclasses.is_dataclass(group):
            own = [
                inspect.Parameter(
                    field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
                )
                for field in dataclasses.fields(group)
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = group, [each.name for each in own]
        parameters += own

    @functools.wraps(command)
    def run(**values: Any) -> None:
        values = {k: expand_user(x) if isinstance(x, Path) else x for k, x in values.items()}
        for name, (group, fields) in groups.items():
            given = {field: values.pop(field) for field in fields}
            if issubclass(group, SamplingOptions):
                given = {field: value for field, value in given.items() if value is not None}
            values[name] = group(**given)
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
