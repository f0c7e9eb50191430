"""--draft, --draft-layers, --lookup: what proposes tokens."""

from typing import Annotated, Any

import typer

DraftFrom = Annotated[
    str | None,
    typer.Option("--draft", help="A model that drafts: a folder or hub id; the text stays."),
]
DraftLayers = Annotated[
    int | None, typer.Option(help="Draft with so many of the model's own first layers.")
]
Lookup = Annotated[bool, typer.Option("--lookup", help="Draft what followed earlier in the text.")]


def check_draft(draft: str | None, layers: int | None, lookup: bool) -> None:
    """Raise ``ValueError`` where several are given."""
    given = {"--draft": draft is not None, "--draft-layers": layers is not None, "--lookup": lookup}
    several = [name for name, there in given.items() if there]
    if len(several) > 1:
        raise ValueError(f"{several[0]} can't stand beside {several[1]}: one of them drafts")


def draft_for(lm: Any, draft: str | None, layers: int | None, lookup: bool, **loading: Any) -> Any:
    """The one that was given, or None; ``loading``: as of ``models.load``."""
    from kvjax import models

    if lookup:
        return "lookup"
    if layers is not None:
        return models.first_layers(lm, layers)
    return None if draft is None else models.load(draft, **loading)
