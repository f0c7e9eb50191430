"""Abstract models and caches, and the sizes that programs are compiled for."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from kvjax.cache.creation import allocate
from kvjax.cache.state import KVCache
from kvjax.generation.capacity import capacity_bucket
from kvjax.generation.model import GenerationDefaults, Model, ModelConfig
from kvjax.generation.request import GenerationRequest
from kvjax.layouts import as_paged
from kvjax.memory.sizes import as_plannable
from kvjax.policies.presets import PolicyChoice, per_layer

_DEFAULTS = GenerationDefaults()


@dataclass(frozen=True)
class AbstractModel:
    """A model whose parameters are ``jax.ShapeDtypeStruct``s."""

    architecture: Model
    config: ModelConfig
    params: PyTree
    mesh: Mesh | None
    generation: GenerationDefaults = _DEFAULTS
    tokenizer: Any = None
    source: str = "an abstract model"

    @classmethod
    def of(cls, lm: Any, mesh: Mesh | None) -> "AbstractModel":
        """The abstract form of a loaded model or an ``Architecture``.

        Raises:
          ValueError: if kvjax can plan for the model, but not run it.
        """
        architecture: Any = getattr(lm, "architecture", lm)
        params = getattr(lm, "params", None)
        if params is None:
            params = as_plannable(architecture).abstract_params()
        if architecture.apply is None:
            raise ValueError(f"a {type(lm).__name__} can only be planned for: give a model")
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        defaults, tokenizer = getattr(lm, "generation", _DEFAULTS), getattr(lm, "tokenizer", None)
        return cls(architecture, lm.config, shapes, mesh, defaults, tokenizer)

    def on(self, mesh: Mesh) -> "AbstractModel":
        """The same model on a mesh."""
        return replace(self, mesh=mesh)


def abstract_request_cache(
    model: AbstractModel,
    policy: PolicyChoice,
    request: GenerationRequest,
    slots: int | None,
    times: int = 1,
) -> KVCache:
    """The abstract cache of a request.

    Args:
      model, policy, request: the model, the cache policy and the request.
      slots: the size that growing layouts have grown to; None for their initial size.
      times: rows per prompt.
    """
    policies = list(per_layer(policy, model.config))
    if slots is not None:
        policies = [
            each if as_paged(each.layout) else replace(each, layout=each.layout.starting_at(slots))
            for each in policies
        ]
    make = functools.partial(
        allocate,
        model.config,
        policies,
        batch=len(request.prompts) * times,
        max_len=request.max_len,
        initial_len=request.capacity,
        mesh=model.mesh,
        rotary_len=request.rotary_len,
    )
    return jax.eval_shape(make)


def request_capacities(request: GenerationRequest, cache: KVCache) -> list[tuple[int, int]]:
    """The capacities that a request's cache, given in its initial size, can have: for each, the
    fewest and the most tokens per row that lead to it."""
    most = request.capacity if cache.grows_to is None else cache.max_len
    ranges = [(1, most)]
    while most < request.capacity:
        fewest, most = most + 1, min(capacity_bucket(most + 1), request.capacity)
        ranges.append((fewest, most))
    return ranges


def chunk_widths(request: GenerationRequest, fewest: int, most: int) -> dict[int, int]:
    """The padded widths of the last chunk of prompts with ``fewest`` to ``most`` tokens, and for
    each width the number of real tokens in such a chunk."""
    chunk, widths = request.prefill_chunk, {}
    for tokens in range(fewest, min(fewest + chunk, most + 1)):
        rest = tokens - (tokens - 1) // chunk * chunk
        widths.setdefault(request.padded_width(rest), rest)
    return widths
