"""The command line: ``kvjax generate``, ``chat``, ``batch``, ``serve``, ``info``, ``eval``,
``plan`` and ``bench``.

Results are printed on standard output, everything else on standard error. An error that the user
can fix (in a file, an option or a length) is printed as one line, and the exit code is 2.
``KVJAX_DEBUG=1`` shows its traceback.
"""

import os
import sys
from typing import Annotated, Any, NoReturn

import jax
import typer

from kvjax import __version__
from kvjax.cli.batch_command import batch
from kvjax.cli.bench_command import bench
from kvjax.cli.chat_command import chat
from kvjax.cli.common import INTERRUPTED, exit_on_interrupt
from kvjax.cli.eval_command import evaluate
from kvjax.cli.generate_command import generate
from kvjax.cli.info_command import info
from kvjax.cli.options import as_command
from kvjax.cli.output import prepare_streams
from kvjax.cli.plan_command import plan
from kvjax.cli.serve_command import serve
from kvjax.core.compat import RESOURCE_EXHAUSTED, jax_0_10_error_code
from kvjax.core.validation import KvjaxError

# Commands import models, and so Flax and the tokenizers, only when they run. This keeps `--help`
# fast.

app = typer.Typer(
    help="The KV cache for JAX.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# Older releases of typer raise click's usage errors; newer ones have a vendored copy of click.
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


app.command("generate")(as_command(generate))
app.command("chat")(as_command(chat))
app.command("batch")(as_command(batch))
app.command("info")(as_command(info))
app.command("eval")(as_command(evaluate))
app.command("plan")(as_command(plan))
app.command("bench")(as_command(bench))
app.command("serve")(as_command(serve))


_LENGTH = "--max-len", "--max-seq-len"
_SYNONYMS = {
    "--tokens": _LENGTH,
    "--length": _LENGTH,
    "--context": _LENGTH,
    "--ctx-size": _LENGTH,
    "--max-model-len": _LENGTH,
    "--max-tokens": ("--max-new-tokens",),
    "--temp": ("--temperature",),
}
"""Options of other programs, and kvjax's options with the same meaning."""


def main() -> None:
    """Run the command line, and exit the process.

    Raises:
      SystemExit: with 0 for success, 2 after an error that the user can fix, and 130 after an
        interrupt. Exceptions from bugs in kvjax are not caught.
    """
    prepare_streams()
    try:
        with exit_on_interrupt():
            code = app(standalone_mode=False)
    except _UsageError as error:
        _exit_with_error(error, f"{error.format_message()}{_suggestion(error)}")
    except (KvjaxError, ValueError, OSError) as error:
        _exit_with_error(error, str(error))
    except jax.errors.JaxRuntimeError as error:
        if jax_0_10_error_code(error) != RESOURCE_EXHAUSTED:
            raise
        _exit_with_error(error, str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _suggestion(error: Any) -> str:
    """Suggest kvjax's option for an unknown option that another program has; empty if there is
    none."""
    unknown, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    parameters = [] if context is None else context.command.params
    known = {name for parameter in parameters for name in parameter.opts}
    options = _SYNONYMS.get(unknown or "", ())
    option = next((name for name in options if name in known), None)
    return "" if option is None else f": did you mean {option}?"


def _exit_with_error(error: Exception, message: str) -> NoReturn:
    if os.environ.get("KVJAX_DEBUG"):
        raise error
    typer.echo("kvjax: error: " + " ".join(message.split()), err=True)
    sys.exit(2)
