"""What generation asks of a model: ``kvjax.models`` gives it, and so does ``language_model``."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from kvjax.cache.state import KVCache
from kvjax.core.checks import is_traced, refuse_traced
from kvjax.core.context import sending
from kvjax.core.target import default_device
from kvjax.core.typing import Array, Tokens
from kvjax.policies.model_config import CacheShape, layer_heads


class Model(Protocol):
    """A model without its parameters, hashable: see ``kvjax.models.architecture``."""

    def apply(
        self,
        params: Any,
        tokens: Tokens,
        cache: KVCache | None = None,
        *,
        lengths: Array | None = None,
        last_only: bool = False,
        max_len: int | None = None,
    ) -> Any: ...


class ModelConfig(CacheShape, Protocol):
    """What generation asks of a model's config."""

    @property
    def vocab_size(self) -> int: ...


@sending
def check_model(lm: Any, *, inside: bool = False) -> None:
    """Raise ``ValueError`` for what is no model to generate with, or within ``jit``, unless it may
    be ``inside``."""
    parts = ("config", "params", "mesh", "tokenizer", "generation", "architecture")
    if missing := [part for part in parts if not hasattr(lm, part)]:
        raise ValueError(
            f"a model is needed, as of kvjax.models.load, not a {type(lm).__name__}: it has no "
            f"{missing[0]}"
        )
    if not hasattr(lm.config, "vocab_size"):
        raise ValueError("the model's config has no vocab_size: generation asks for it")
    layer_heads(lm.config)
    check_device(lm)
    try:
        hash(lm.architecture)
    except TypeError:
        raise ValueError(
            "lm.architecture has no hash, and is a static argument of compiled programs: make it "
            "a frozen dataclass of what can be hashed"
        ) from None
    if not inside:
        # There, what is made is traced.
        refuse_traced("generation", jnp.zeros(()))


def check_device(lm: Any) -> None:
    """Raise ``ValueError`` for a model on one device, and not the one that caches are made on:
    what is uncommitted would be moved at every call."""
    leaf = next(iter(jax.tree.leaves(lm.params)), None)
    if lm.mesh is not None or not isinstance(leaf, jax.Array) or is_traced(leaf):
        return
    ours, here = leaf.sharding.device_set, default_device()
    if ours != {here}:
        there = ", ".join(map(str, ours))
        raise ValueError(
            f"the model is on {there}, and JAX's default device is {here}: call it inside "
            "jax.default_device(...) of the model's, or put the model there"
        )
