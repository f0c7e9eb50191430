"""Replaces ``**settings: Unpack[...]`` in the reference by the keywords themselves, and takes the
docstrings of these functions as they are at run time."""

import importlib
import inspect
import re
from typing import Any

import griffe

MODULE_PREFIX = re.compile(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])")


def annotation(parameter: inspect.Parameter) -> str | None:
    """A parameter's type, without the modules of its names."""
    if parameter.annotation is inspect.Parameter.empty:
        return None
    return MODULE_PREFIX.sub("", inspect.formatannotation(parameter.annotation))


class Keywords(griffe.Extension):
    """Reads the signature of each such function from the imported package."""

    def on_function(self, *, func: griffe.Function, loader: Any, **kwargs: Any) -> None:
        """Called for each function, once its package is loaded."""
        if not any("Unpack[" in str(parameter.annotation) for parameter in func.parameters):
            return
        try:
            value = importlib.import_module(func.module.path)
        except ImportError:  # an adapter of a library that is not installed
            return
        for name in func.path.removeprefix(f"{func.module.path}.").split("."):
            value = getattr(value, name)
        if func.docstring is not None:
            func.docstring.value = inspect.getdoc(value) or ""
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    parameter.name,
                    annotation=annotation(parameter),
                    kind=griffe.ParameterKind(parameter.kind.description),
                    default=(
                        None
                        if parameter.default is inspect.Parameter.empty
                        else repr(parameter.default)
                    ),
                )
                for parameter in inspect.signature(value).parameters.values()
            )
        )
