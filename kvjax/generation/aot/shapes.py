"""Abstract models and caches, and the sizes that programs are compiled for."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from kvjax.cache.creation import allocate
from kvjax.cache.state import KVCache
from kvjax.generation.capacity import capacity_bucket
from kvjax.generation.model import GenerationDefaults, Model
from kvjax.generation.request import GenerationRequest
from kvjax.layouts import paged
from kvjax.memory.sizes import as_plannable
from kvjax.policies.presets import PolicyChoice, per_layer

_DEFAULTS = GenerationDefaults()


@dataclass(frozen=True)
class AbstractModel:
    """A model whose parameters are shapes alone."""

    architecture: Model
    config: Any
    params: Any
    mesh: Mesh | None
    generation: GenerationDefaults = _DEFAULTS
    tokenizer: Any = None
    source: str = "a model of shapes"

    @classmethod
    def of(cls, lm: Any, mesh: Mesh | None) -> "AbstractModel":
        """Of a loaded model, or of an ``Architecture``.

        Raises:
          ValueError: if it is none, or a shape that kvjax does not run.
        """
        architecture: Any = getattr(lm, "architecture", lm)
        params = getattr(lm, "params", None)
        if params is None:
            params = as_plannable(architecture).abstract_params()
        if architecture.apply is None:
            raise ValueError(f"a {type(lm).__name__} is planned for, and not run: give a model")
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        defaults, words = getattr(lm, "generation", _DEFAULTS), getattr(lm, "tokenizer", None)
        return cls(architecture, lm.config, shapes, mesh, defaults, words)

    def on(self, mesh: Mesh) -> "AbstractModel":
        """On a mesh."""
        return replace(self, mesh=mesh)


def abstract_request_cache(
    model: AbstractModel,
    policy: PolicyChoice,
    request: GenerationRequest,
    slots: int | None,
    times: int = 1,
) -> KVCache:
    """The cache of a request, as shapes; what grows, grown to so many slots; so many rows of each
    prompt."""
    each = list(per_layer(policy, model.config))
    if slots is not None:
        each = [
            one if paged(one.layout) else replace(one, layout=one.layout.starting_at(slots))
            for one in each
        ]
    make = functools.partial(
        allocate,
        model.config,
        each,
        batch=len(request.prompts) * times,
        max_len=request.max_len,
        initial_len=request.capacity,
        mesh=model.mesh,
        rotary_len=request.rotary_len,
    )
    return jax.eval_shape(make)


def request_capacities(request: GenerationRequest, cache: KVCache) -> list[tuple[int, int]]:
    """The fewest and the most tokens a row that meet each capacity of a request's cache, which is
    given as it begins."""
    most = request.capacity if cache.grows_to is None else cache.max_len
    found = [(1, most)]
    while most < request.capacity:
        least, most = most + 1, min(capacity_bucket(most + 1), request.capacity)
        found.append((least, most))
    return found


def chunk_widths(request: GenerationRequest, least: int, most: int) -> dict[int, int]:
    """The widths of a prompt's last chunk that meet a capacity, and of each the longest such chunk:
    as many lengths as have all widths that end there."""
    chunk, found = request.prefill_chunk, {}
    for held in range(least, min(least + chunk, most + 1)):
        rest = held - (held - 1) // chunk * chunk
        found.setdefault(request.padded_width(rest), rest)
    return found
