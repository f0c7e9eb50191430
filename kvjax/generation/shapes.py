"""A model whose parameters are not there: their shapes alone."""

from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from kvjax.generation.defaults import GenerationDefaults
from kvjax.generation.model import Model
from kvjax.memory.weights import plannable

_DEFAULTS = GenerationDefaults()


@dataclass(frozen=True)
class Shapes:
    """A model whose parameters are shapes alone."""

    architecture: Model
    config: Any
    params: Any
    mesh: Mesh | None
    generation: GenerationDefaults = _DEFAULTS
    tokenizer: Any = None
    source: str = "a model of shapes"

    @classmethod
    def of(cls, lm: Any, mesh: Mesh | None) -> "Shapes":
        """Of a loaded model, or of an ``Architecture``.

        Raises:
          ValueError: if it is none, or a shape that kvjax does not run.
        """
        architecture: Any = getattr(lm, "architecture", lm)
        params = getattr(lm, "params", None)
        if params is None:
            params = plannable(architecture).abstract_params()
        if architecture.apply is None:
            raise ValueError(f"a {type(lm).__name__} is planned for, and not run: give a model")
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        defaults, words = getattr(lm, "generation", _DEFAULTS), getattr(lm, "tokenizer", None)
        return cls(architecture, lm.config, shapes, mesh, defaults, words)

    def on(self, mesh: Mesh) -> "Shapes":
        """On a mesh."""
        return replace(self, mesh=mesh)
