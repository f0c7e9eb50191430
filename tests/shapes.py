"""The run-time checker of shapes that ``conftest`` puts on kvjax' functions that name any."""

import ast
import types
import typing
from pathlib import Path
from typing import Any

import beartype
import jaxtyping
import numpy as np
from jaxtyping._import_hook import JaxtypingTransformer

TYPING = Path(__file__).resolve().parents[1] / "kvjax" / "core" / "typing.py"
NAMES = {
    target.id
    for node in ast.parse(TYPING.read_text(encoding="utf-8")).body
    if isinstance(node, ast.Assign)
    for target in node.targets
    if isinstance(target, ast.Name)
} | {
    name
    for name, value in vars(jaxtyping).items()
    if isinstance(value, type) and issubclass(value, jaxtyping.AbstractDtype)
}
"""By which a signature names a shape: jaxtyping's, and kvjax's own."""


def install() -> None:
    """Of kvjax' functions, check those alone that name a shape: being called through a checker
    costs the others more than their own work."""
    every = JaxtypingTransformer.visit_FunctionDef

    def visit(self: Any, node: ast.FunctionDef) -> Any:
        names_any = _names(node.args) | (_names(node.returns) if node.returns else set())
        return every(self, node) if names_any & NAMES else self.generic_visit(node)

    JaxtypingTransformer.visit_FunctionDef = visit
    JaxtypingTransformer.visit_ClassDef = lambda self, node: self.generic_visit(node)
    jaxtyping.install_import_hook("kvjax", "tests.shapes.checked")


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def checked(function: Any) -> Any:
    """Check dtypes and shapes of arrays, of NumPy's too; the type checker has the rest already."""
    hints = getattr(function, "__annotations__", {})
    arrays = {name: _arrays(hint) for name, hint in hints.items()}
    function.__annotations__ = {name: hint for name, hint in arrays.items() if hint is not None}
    return beartype.beartype(function)


def _arrays(hint: Any) -> Any:
    """The hint with NumPy's arrays allowed, or None where it is not of arrays alone."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [p if p is type(None) else _arrays(p) for p in typing.get_args(hint)]
        return None if None in parts else typing.Union[tuple(parts)]  # noqa: UP007
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return hint.dtype[jaxtyping.Array | np.ndarray, hint.dim_str]
    return None
