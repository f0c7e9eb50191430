"""A function, its config and its parameters as a LanguageModel."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from kvjax.adapters._tokenizer import as_tokenizer
from kvjax.attention.step import Step
from kvjax.cache.state import KVCache
from kvjax.core.typing import Array, Counts, Tokens
from kvjax.core.validation import as_int
from kvjax.generation.loaded_model import LanguageModel, without_weak_types
from kvjax.generation.model import GenerationDefaults, apply_in_chunks
from kvjax.placement.mesh import shard_over
from kvjax.policies.model_config import common_heads, decoder_config, layer_heads

_NEEDED = ("params", "tokens", "cache", "lengths")
_TAKEN = ("last_only", "max_len")
"""What a function is told beside these, if it has a parameter of this name."""


def language_model(
    apply: Callable[..., Any],
    config: Any,
    params: Any,
    tokenizer: Any = None,
    *,
    eos_token_ids: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    specs: Any = None,
) -> LanguageModel:
    """A model of one's own, for ``generate``, ``stream``, ``compile``, ``evaluate``, ``plan``,
    ``bench`` and ``rollout``::

        def apply(params, tokens, cache, lengths):
            x, call = params["embed"][tokens], kvjax.step(cache, tokens, lengths=lengths)
            ...                                       # layers, each with call.attend
            return logits, call.done()

        lm = kvjax.language_model(apply, config, params, tokenizer)

    Args:
      apply: ``(params, tokens, cache, lengths) -> (logits, cache)``, pure. ``tokens``: int32
        [batch, new], right-padded; ``cache``: a ``KVCache``, or None for the same without one, and
        then the second result is not looked at; ``lengths``: int32[batch], real tokens a row, or
        None for all; logits: [batch, new, vocab]. If it has a parameter ``last_only``, it is True
        where only the logits of each row's last real token are wanted, [batch, 1, vocab], which
        saves the others' work; ``max_len``: without a cache, the length that length-dependent
        rotary frequencies go by. Programs are compiled once for each function: one that is
        defined anew is compiled anew.
      config: an object or a mapping with ``num_hidden_layers``, ``num_key_value_heads``,
        ``head_dim`` and ``vocab_size``, Transformers' names, whose own configs serve as well.
        ``dtype``, of caches, is by default that of most of ``params``. Where it has them:
        ``position_limit``, how many positions the model has; ``windows`` or ``layer_types``;
        ``stacked``, True for a model that goes through its layers by a scan and so takes stacked
        caches; ``num_attention_heads`` and ``hidden_size``, which ``plan`` goes by.
      params: a tree of arrays.
      tokenizer: of kvjax, Transformers or ``tokenizers``, or any object with ``encode(text)`` and
        ``decode(ids)``; None for prompts of token ids alone.
      eos_token_ids: tokens that end a text; by default the config's ``eos_token_id``, if there.
      pad_token_id: what stands behind the real tokens of a row, any token.
      specs: what of each parameter the axes of a mesh divide: ``PartitionSpec``, in a tree like
        ``params`` or its upper part. By default every device of a mesh has all of them.

    Raises:
      ValueError: if ``apply`` has no such parameters, or no hash; the config lacks a number; a
        token is not in the vocabulary; ``params`` has no arrays.
    """
    config = _config(config, params)
    vocab = as_int("the config's vocab_size", config.vocab_size, 1)
    if eos_token_ids is None:
        eos_token_ids = getattr(config, "eos_token_id", None)
    ends = _ids(eos_token_ids)
    for token in (*ends, *_ids(pad_token_id)):
        if as_int("a token", token, 0) >= vocab:
            raise ValueError(f"token {token}: the vocabulary has {vocab}, 0 to {vocab - 1}")
    name = getattr(apply, "__name__", type(apply).__name__)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    leaves, structure = jax.tree.flatten(shapes)
    model = FunctionModel(
        apply, vocab, _taken(apply, name), structure, tuple(leaves), config, specs
    )
    defaults = GenerationDefaults(eos_token_ids=ends, pad_token_id=pad_token_id)
    params = without_weak_types(params)
    return LanguageModel(config, params, as_tokenizer(tokenizer), defaults, model, source=name)


def _config(config: Any, params: Any) -> Any:
    """The config of the decoder, with a dtype."""
    if isinstance(config, Mapping):
        config = SimpleNamespace(**config)
    config = decoder_config(config)
    layer_heads(config)
    if not hasattr(config, "vocab_size"):
        raise ValueError(f"the config, a {type(config).__name__}, has no vocab_size")
    leaves = jax.tree.leaves(params)
    if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
        raise ValueError("params must be a tree of arrays, with nothing else in it")
    if getattr(config, "dtype", None) is not None:
        return config
    bytes_of: Counter[str] = Counter()
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            bytes_of[jnp.dtype(leaf.dtype).name] += leaf.size * leaf.dtype.itemsize
    # That of most: norms are often wider.
    return _With(config, dtype=max(bytes_of, key=lambda name: bytes_of[name], default="float32"))


class _With:
    """A config, and what it does not say."""

    def __init__(self, config: Any, **said: Any) -> None:
        vars(self).update(said, _config=config)

    def get_text_config(self, decoder: bool = True) -> "_With":
        """Itself: of Transformers' configs it has the decoder's."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._config, name)


def _taken(apply: Callable[..., Any], name: str) -> tuple[str, ...]:
    """What a function is told beside what every one is."""
    try:
        hash(apply)
        signature = inspect.signature(apply)
        signature.bind(*_NEEDED)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be a function of (params, tokens, cache, lengths), with a hash: {error}"
        ) from None
    return tuple(name for name in _TAKEN if name in signature.parameters)


def _ids(given: Any) -> tuple[int, ...]:
    if given is None:
        return ()
    return tuple(int(i) for i in given) if isinstance(given, Iterable) else (given,)


@dataclass(frozen=True, eq=False)
class FunctionModel:
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
        if self is other or not isinstance(other, FunctionModel):
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
        return apply_in_chunks(run, tokens, cache, lengths, last_only=last_only, vocab=self.vocab)

    def abstract_params(self) -> Any:
        """Shapes and dtypes of the parameters."""
        return self.structure.unflatten(self.leaves)

    def param_shardings(self, mesh: Mesh | AbstractMesh) -> Any:
        """The sharding of each parameter over a mesh.

        Raises:
          ValueError: if the mesh has other axes than ``kvjax.make_mesh`` gives it, or ``specs`` are
            of another tree.
        """
        spread = shard_over(mesh, common_heads(self.config))
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
