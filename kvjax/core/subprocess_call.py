"""Call a function in another process."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_MAIN = "from kvjax.core.subprocess_call import _main; _main()"


def call_in_subprocess(function: Callable[..., T], *args: object, **kwargs: object) -> T:
    """``function(*args, **kwargs)``, computed by a new process that uses no GPU or TPU.

    Raises:
      ValueError: if the function or an argument can't be pickled. Functions of a notebook or of
        the main script can't be.
      RuntimeError: if the process ends without a result.
      Exception: any exception of the function.
    """
    try:
        sent = pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_picklable(error) from error
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run(
        [sys.executable, "-c", _MAIN], input=sent, capture_output=True, env=os.environ | own
    )
    if process.returncode:
        stderr = process.stderr.decode()[-500:]
        raise RuntimeError(f"the subprocess ended without a result: {stderr}")
    result, error = pickle.loads(process.stdout)
    if isinstance(error, AttributeError | ImportError) and result == "not read":
        raise _not_picklable(error) from error
    if error is not None:
        raise error
    return result


def _not_picklable(error: Exception) -> ValueError:
    return ValueError(
        f"the call can't be sent to another process ({error}): start a new process yourself"
    )


def _main() -> None:
    """Run by the subprocess: reads the call from stdin and writes ``(result, error)`` to stdout."""
    out = os.dup(1)
    os.dup2(2, 1)  # printed text must not mix with the result
    try:
        function, args, kwargs = pickle.load(sys.stdin.buffer)
    except (AttributeError, ImportError) as error:
        result: Any = "not read", error
    else:
        try:
            result = function(*args, **kwargs), None
        except Exception as error:
            result = None, error
    try:
        sent = pickle.dumps(result)
    except Exception:  # the error itself can't be pickled
        sent = pickle.dumps((None, RuntimeError(f"{type(result[1]).__name__}: {result[1]}")))
    with os.fdopen(out, "wb") as file:
        file.write(sent)
