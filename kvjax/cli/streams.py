"""Standard streams as they are found: closed, or of an encoding that lacks characters."""

import io
import json
import os
import sys
from typing import Any

import typer

from kvjax.cli.output import to_json


def prepare_streams() -> None:
    """Let what a console can't show be printed as an escape, and what comes from a file or a pipe
    be read as UTF-8, whatever the locale says."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def echo_json(value: dict[str, Any]) -> None:
    """Print one JSON object on one line, with escapes of its own where the console lacks
    characters: others would be no JSON."""
    words = to_json(value)
    try:
        words.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        words = json.dumps(value, allow_nan=False)
    typer.echo(words)
