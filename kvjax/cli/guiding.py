"""--json-schema, --regex, --choice, --grammar: what a text keeps to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.cli.common import read
from kvjax.core.array_folder import expand_user
from kvjax.generation.results import GenerationResult

JsonSchema = Annotated[
    str | None,
    typer.Option(help="Keep to a JSON schema: a file, or its text, which begins with {."),
]
Regex = Annotated[str | None, typer.Option(help="Keep to a regular expression of Rust's.")]
Choice = Annotated[list[str] | None, typer.Option(help="Give one of these texts; may be repeated.")]
Grammar = Annotated[
    Path | None, typer.Option(help="Keep to a grammar in Lark's form, in this file.")
]

Form = tuple[str, Any]
"""What makes a guide: the name of a function of ``Guides``, and its argument."""


def given_form(
    json_schema: str | None, regex: str | None, choice: Sequence[str] | None, grammar: Path | None
) -> Form | None:
    """The one that was given, or none, with what stands in its file.

    Raises:
      ValueError: if there are several, or a file is not there.
    """
    every = {
        "--json-schema": json_schema, "--regex": regex, "--choice": choice or None,
        "--grammar": grammar,
    }  # fmt: skip
    given = [name for name, value in every.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{given[0]} can't stand beside {given[1]}: a text keeps to one of them")
    if json_schema is not None:
        text = json_schema if json_schema.lstrip().startswith("{") else _words(json_schema)
        return "json_schema", text
    if grammar is not None:
        return "grammar", _words(grammar)
    if choice:
        return "choices", tuple(choice)
    return None if regex is None else ("regex", regex)


def guide_of(lm: Any, form: Form | None) -> Any:
    """A guide, where one was asked for."""
    if form is None:
        return None
    from kvjax.generation.guides.grammars import Guides

    name, value = form
    return getattr(Guides(lm), name)(value)


def check_kept(result: GenerationResult) -> None:
    """Raise ``ValueError`` if a guide could not go on."""
    for guide in result.guides or ():
        if guide is not None and guide.error is not None:
            raise ValueError(f"the text ends early, for its guide can't go on: {guide.error}")


def _words(file: str | Path) -> str:
    if not (path := expand_user(file)).is_file():
        raise ValueError(f"there is no file {str(file)!r:.200}")
    return read(path)
