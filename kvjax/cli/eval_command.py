"""``kvjax eval``: cache policies side by side."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.cli import options
from kvjax.cli.common import read, use_compilation_cache
from kvjax.cli.progress import shown
from kvjax.cli.streams import echo_json
from kvjax.policies.presets import parse_policy


def evaluate(
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="The text (UTF-8); by default the embedded model's own."),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", "-p", help="NAME,SETTING=VALUE,...: bits=4, static,key_bits=8,value_bits=4."
        ),
    ] = None,
    model: options.Model = None,
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window; by default the model's limit.")
    ] = None,
    windows: Annotated[int | None, typer.Option(help="How many windows; by default all.")] = None,
    time_steps: Annotated[int, typer.Option(help="Decode steps to time, for each policy.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw quality against bytes (png, svg).")
    ] = None,
    recall: Annotated[
        bool,
        typer.Option(
            "--recall", help="Ask a model that was trained to remember for facts, instead."
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Compare cache policies: what they do to a model's predictions on a text, and their bytes."""
    use_compilation_cache()
    from kvjax import models
    from kvjax.models.recall import measure
    from kvjax.models.tiny.data import part_tokens
    from kvjax.quality import reports
    from kvjax.quality.evaluation import evaluate

    chosen = policies or [*(["static"] if recall else []), *reports.DEFAULT_POLICIES]
    named = {words: parse_policy(words) for words in chosen}
    if recall:
        unused = {"--file": file, "--model": model, "--revision": revision, "--dtype": dtype,
                  "--context": context, "--windows": windows, "--time-steps": time_steps or None,
                  "--plot": plot}  # fmt: skip
        for option, value in unused.items():
            if value is not None:
                raise ValueError(f"{option} is not for --recall, which has a model of its own")
        with shown("asking for facts", lines=True):
            found = measure.recall(named)
        tables = [measure.rows(found)]
    else:
        if plot is not None:
            reports.pyplot()  # if it is missing, that is told before anything is measured
        if file is None and model is not None:
            raise ValueError("no text: give a --file")
        with shown("loading"):
            lm = models.load(model, dtype=dtype, revision=revision)
        with shown("reading the text" if file is not None else "finding the held-out text"):
            text: Any = read(file) if file is not None else part_tokens("held_out", lm)
        with shown("evaluating", lines=True):
            found = evaluate(
                lm, text, named, context=context, windows=windows, time_steps=time_steps
            )
        if plot is not None:
            reports.plot_quality(found, plot, title=model or "the embedded model")
        tables = [reports.quality_rows(found), reports.range_rows(found)]
    if as_json:
        echo_json(reports.as_dicts(found))
    else:
        typer.echo("\n\n".join(map(reports.format_columns, tables)))
