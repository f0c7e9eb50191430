"""The command line: a file a command."""

from kvjax.cli.program import app, main

__all__ = ["app", "main"]
