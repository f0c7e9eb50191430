"""The command line: one file for each command."""

from kvjax.cli.entry_point import app, main

__all__ = ["app", "main"]
