"""A function of the user's own as a model without its parameters, and what it must give."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from kvjax.attention.step import Step
from kvjax.cache.state import KVCache
from kvjax.core.typing import Array, Counts, Tokens
from kvjax.generation.model import in_parts
from kvjax.placement.mesh import spread_over
from kvjax.policies.model_config import common_heads


@dataclass(frozen=True, eq=False)
class AnyModel:
    """A function as a model without its parameters: what ``kvjax.models.Architecture`` is of those.

    Equal are those of one function, for parameters of the same shapes: that is what a program of
    it is traced by. Config and specs are not: caches, and where parameters are, come from them
    before, and are arguments of the program.
    """

    function: Callable[..., Any]
    vocab: int
    takes: tuple[str, ...]
    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    config: Any
    specs: Any

    in_one_piece = True
    """It can't be taken apart into layers."""

    def __post_init__(self) -> None:
        # Of every dispatch: parameters may be many.
        vars(self)["_hash"] = hash((self.function, self.vocab, self.structure, self.leaves))

    def __hash__(self) -> int:
        return int(vars(self)["_hash"])

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, AnyModel):
            return self is other
        return (self.function, self.vocab, self.structure, self.leaves) == (
            other.function, other.vocab, other.structure, other.leaves
        )  # fmt: skip

    def apply(
        self,
        params: Any,
        tokens: Tokens,
        cache: KVCache | None = None,
        *,
        lengths: Counts | None = None,
        last_only: bool = False,
        max_len: int | None = None,
    ) -> Any:
        """See ``kvjax.models.Architecture.apply``."""
        tokens = jnp.asarray(tokens)
        told = {"last_only": last_only, "max_len": max_len}

        def run(tokens: Tokens, cache: KVCache | None, lengths: Counts | None) -> Any:
            more = {name: told[name] for name in self.takes}
            found = self.function(params, tokens, cache, lengths, **more)
            logits, after = self._checked(found, tokens.shape, cache, last_only)
            if last_only and logits.shape[1] > 1:
                logits = _last_real(logits, lengths)
            return logits.astype(jnp.float32), after

        if cache is None:
            return run(tokens, None, lengths)[0]
        return in_parts(run, tokens, cache, lengths, last_only=last_only, vocab=self.vocab)

    def abstract_params(self) -> Any:
        """Shapes and dtypes of the parameters."""
        return self.structure.unflatten(self.leaves)

    def param_shardings(self, mesh: Mesh | AbstractMesh) -> Any:
        """The sharding of each parameter over a mesh.

        Raises:
          ValueError: if the mesh has other axes than ``kvjax.make_mesh`` gives it, or ``specs`` are
            of another tree.
        """
        spread = spread_over(mesh, common_heads(self.config))
        specs = PartitionSpec() if self.specs is None else self.specs
        shapes = self.abstract_params()
        try:
            each = jax.tree.broadcast(specs, shapes, is_leaf=_is_spec)
        except ValueError as error:
            raise ValueError(f"specs are of another tree than params: {error}") from None
        return jax.tree.map(spread.sharding, each, is_leaf=_is_spec)

    def _checked(
        self, found: Any, tokens: tuple[int, ...], cache: KVCache | None, last_only: bool
    ) -> tuple[Array, KVCache]:
        """What the function gave, if it is what it must be."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(f"{name} must return (logits, cache), and gave {_kind(found)}")
        logits, after = found
        batch, new = tokens
        shapes = [(batch, new, self.vocab)] + [(batch, 1, self.vocab)] * last_only
        if getattr(logits, "shape", None) not in shapes:
            raise ValueError(
                f"the logits of {name} must be [batch={batch}, new={new}, vocab={self.vocab}], and "
                f"are {_kind(logits)}"
            )
        if cache is None:
            return logits, after
        if isinstance(after, Step):
            raise ValueError(f"{name} gave the call in place of the cache: call.done() gives that")
        if not isinstance(after, KVCache):
            raise ValueError(f"{name} must return (logits, cache), and its cache is {_kind(after)}")
        if after.pending is not None:
            raise ValueError(f"{name} gave a cache in the middle of a call: call.done() ends it")
        if after.length is cache.length:
            raise ValueError(
                f"{name} gave the cache that it was given, without the call's tokens: give "
                "call.done()"
            )
        kept, grown = (jax.tree.structure(each) for each in (cache, after))
        if kept != grown:
            raise ValueError(
                f"{name} gave another cache than the one that it was given: its policies, or the "
                "layers of its stacks, are others"
            )
        return logits, after


def _last_real(logits: Array, lengths: Counts | None) -> Array:
    """Of each row's last real token: [batch, 1, vocab]."""
    if lengths is None:
        return logits[:, -1:]
    at = jnp.clip(jnp.asarray(lengths, jnp.int32) - 1, 0, logits.shape[1] - 1)
    return jnp.take_along_axis(logits, at[:, None, None], axis=1)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _kind(x: Any) -> str:
    shape = getattr(x, "shape", None)
    if shape is not None:
        return f"{x.dtype.name}{list(shape)}"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    return f"a {type(x).__name__}"
