"""Calls whose results another process finds."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_RUN = "from kvjax.core.subprocess_call import _run; _run()"


def call_in_subprocess(function: Callable[..., T], *given: Any, **named: Any) -> T:
    """``function(*given, **named)``, found by a new process, which takes hold of no GPU or TPU.

    Raises:
      ValueError: if the function or what it is given can't be sent there: functions of a notebook
        or of the script that was started are such.
      Exception: what the function raises; ``RuntimeError`` if its process ends without a result.
    """
    try:
        sent = pickle.dumps((function, given, named))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_sent(error) from error
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", _RUN], input=sent, capture_output=True, env=os.environ | own
    )
    if done.returncode:
        raise RuntimeError(f"another process ended without a result: {done.stderr.decode()[-500:]}")
    found, error = pickle.loads(done.stdout)
    if isinstance(error, AttributeError | ImportError) and found == "not read":
        raise _not_sent(error) from error
    if error is not None:
        raise error
    return found


def _not_sent(error: Exception) -> ValueError:
    return ValueError(f"this can't be sent to another process ({error}): call it in a new one")


def _run() -> None:
    """That process: from its input to its output."""
    out = os.dup(1)
    os.dup2(2, 1)  # what is printed is no result
    try:
        function, given, named = pickle.load(sys.stdin.buffer)
    except (AttributeError, ImportError) as error:
        result: Any = "not read", error
    else:
        try:
            result = function(*given, **named), None
        except Exception as error:
            result = None, error
    try:
        sent = pickle.dumps(result)
    except Exception:  # of an error that can't be sent
        sent = pickle.dumps((None, RuntimeError(f"{type(result[1]).__name__}: {result[1]}")))
    with os.fdopen(out, "wb") as file:
        file.write(sent)
