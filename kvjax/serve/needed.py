"""What serving needs, where it is installed."""

import importlib.util

_NEEDED = ("starlette", "uvicorn", "prometheus_client", "llguidance")


def check_installed() -> None:
    """Raise ``ValueError`` if a package is not installed that serving needs."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f'serving needs {missing[0]}: pip install "kvjax[serve]" installs all that it needs'
        )
