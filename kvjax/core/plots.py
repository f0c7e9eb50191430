"""Matplotlib, where it is installed."""

import importlib.util
from typing import Any


def pyplot() -> Any:
    """Matplotlib, drawing into files.

    Raises:
      ValueError: if it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('a plot needs matplotlib: pip install "kvjax[plots]" installs it')
    from matplotlib import pyplot

    pyplot.switch_backend("agg")
    return pyplot
