"""The command line: a file a command."""

from kvjax.cli.main import app, main

__all__ = ["app", "main"]
