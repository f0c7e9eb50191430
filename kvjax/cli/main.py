"""The command line: ``kvjax generate``, ``chat``, ``batch``, ``serve``, ``info``, ``eval``,
``plan`` and ``bench``.

Results go to standard output, everything else to standard error. What the user can mend (a file, an
option, a length) is one line and exit code 2; ``KVJAX_DEBUG=1`` shows where it was raised.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import jax
import typer

from kvjax import __version__
from kvjax.cli.batch_command import batch
from kvjax.cli.bench_command import bench
from kvjax.cli.chat_command import chat
from kvjax.cli.eval_command import evaluate
from kvjax.cli.generate_command import generate
from kvjax.cli.info_command import info
from kvjax.cli.plan_command import plan
from kvjax.cli.progress import INTERRUPTED, interruptible
from kvjax.cli.serve_command import serve
from kvjax.cli.streams import prepare_streams
from kvjax.core.array_folder import expand_user
from kvjax.core.compat import RESOURCE_EXHAUSTED, jax_0_10_error_code
from kvjax.core.errors import KvjaxError

# Models, and with them Flax and the tokenizers, are imported in the commands: `--help` stays quick.

app = typer.Typer(
    help="The KV cache for JAX.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# Older releases of typer take their usage errors from click, newer ones from a copy of their own.
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"kvjax {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _paths_at_home(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose paths may begin with ``~``, which shells leave as it is in ``--out=~/x``."""

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        paths = {name: expand_user(x) for name, x in given.items() if isinstance(x, Path)}
        return command(**given | paths)

    return run


for name, command in {
    "generate": generate, "chat": chat, "batch": batch, "info": info, "eval": evaluate,
    "plan": plan, "bench": bench, "serve": serve,
}.items():  # fmt: skip
    app.command(name)(_paths_at_home(command))


_LENGTH = "--max-len", "--max-seq-len"
_MEANT = {
    "--tokens": _LENGTH, "--length": _LENGTH, "--context": _LENGTH, "--ctx-size": _LENGTH,
    "--max-model-len": _LENGTH, "--max-tokens": ("--max-new-tokens",), "--temp": ("--temperature",),
}  # fmt: skip
"""Options of other programs, and what they are called here."""


def main() -> None:
    """Run the command line and leave the process with its exit code.

    Raises:
      SystemExit: 0 when all went well, 2 after an error that the user can mend (one line on
        standard error), 130 when interrupted. Errors of kvjax itself keep their traceback.
    """
    prepare_streams()
    try:
        with interruptible():
            code = app(standalone_mode=False)
    except _UsageError as error:
        _leave(error, f"{error.format_message()}{_hint(error)}")
    except (KvjaxError, ValueError, OSError) as error:
        _leave(error, str(error))
    except jax.errors.JaxRuntimeError as error:
        if jax_0_10_error_code(error) != RESOURCE_EXHAUSTED:
            raise
        _leave(error, str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _hint(error: Any) -> str:
    """What may have been meant by an option that a command does not have."""
    given, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    params = [] if context is None else context.command.params
    known = {name for each in params for name in each.opts}
    meant = next((name for name in _MEANT.get(given or "", ()) if name in known), None)
    return "" if meant is None else f": {meant}, perhaps"


def _leave(error: Exception, message: str) -> NoReturn:
    if os.environ.get("KVJAX_DEBUG"):
        raise error
    typer.echo("kvjax: error: " + " ".join(message.split()), err=True)
    sys.exit(2)
