"""The command line: one file for each command."""

from kvjax.cli.main import app, main

__all__ = ["app", "main"]
