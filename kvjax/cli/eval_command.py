"""``kvjax eval``: how cache policies change a model's predictions."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.cli import options
from kvjax.cli.common import read_text, use_compilation_cache
from kvjax.cli.output import echo_json, show_progress
from kvjax.policies.presets import parse_policy


def evaluate(
    *,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="The text (UTF-8); by default the embedded model's own."),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="A policy, as NAME,SETTING=VALUE,...: bits=4, static,key_bits=8,value_bits=4; may "
            "be repeated.",
        ),
    ] = None,
    model: options.ModelOptions,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window; by default the model's limit.")
    ] = None,
    windows: Annotated[int | None, typer.Option(help="Number of windows; by default all.")] = None,
    time_steps: Annotated[
        int, typer.Option(help="Decode steps to time, for each policy; 0 for none.")
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Plot quality against bytes into this file (png, svg).")
    ] = None,
    recall: Annotated[
        bool,
        typer.Option("--recall", help="Instead, ask a model that was trained to recall facts."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Compare cache policies: their effect on a model's predictions for a text, and their size."""
    use_compilation_cache()
    from kvjax.models.recall import measure
    from kvjax.models.tiny.data import part_tokens
    from kvjax.quality import reports
    from kvjax.quality.evaluation import evaluate

    names = policies or [*(["static"] if recall else []), *reports.DEFAULT_POLICIES]
    named = {name: parse_policy(name) for name in names}
    if recall:
        unused = {
            "--file": file,
            "--model": model.model,
            "--revision": model.revision,
            "--dtype": model.dtype,
            "--context": context,
            "--windows": windows,
            "--time-steps": time_steps or None,
            "--plot": plot,
        }
        for option, value in unused.items():
            if value is not None:
                raise ValueError(f"{option} does not apply to --recall, which has its own model")
        with show_progress("asking for facts", lines=True):
            result = measure.recall(named)
        tables = [measure.rows(result)]
    else:
        if plot is not None:
            reports.pyplot()  # raises early if matplotlib is missing
        if file is None and model.model is not None:
            raise ValueError("no text: give a --file")
        with show_progress("loading"):
            lm = model.load()
        with show_progress("reading the text" if file is not None else "finding the held-out text"):
            text: Any = read_text(file) if file is not None else part_tokens("held_out", lm)
        with show_progress("evaluating", lines=True):
            result = evaluate(
                lm, text, named, context=context, windows=windows, time_steps=time_steps
            )
        if plot is not None:
            reports.plot_quality(result, plot, title=model.model or "the embedded model")
        tables = [reports.quality_rows(result), reports.range_rows(result)]
    if as_json:
        echo_json(reports.as_dicts(result))
    else:
        typer.echo("\n\n".join(map(reports.format_columns, tables)))
