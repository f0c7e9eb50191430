"""``language_model``: turn a function, a config and parameters into a ``LanguageModel``."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import PyTree

from kvjax.attention.step import Step
from kvjax.cache.state import KVCache
from kvjax.core.typing import Array, Counts, Tokens
from kvjax.core.validation import as_int
from kvjax.generation.detokenizer import TextStream, Tokenizer
from kvjax.generation.loaded_model import LanguageModel, without_weak_types
from kvjax.generation.model import GenerationDefaults, ModelConfig, apply_in_chunks
from kvjax.placement.mesh import shard_over
from kvjax.policies.model_config import common_heads, decoder_config, layer_heads

ApplyFunction = Callable[..., tuple[Array, KVCache | None]]
_REQUIRED = ("params", "tokens", "cache", "lengths")
_OPTIONAL = ("last_only", "max_len")
"""Parameters that a user's function may have. kvjax passes them only if the function has them."""


def language_model(
    apply: ApplyFunction,
    config: object,
    params: PyTree,
    tokenizer: object = None,
    *,
    eos_token_ids: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    specs: PyTree = None,
) -> LanguageModel:
    """Use your own model with ``generate``, ``stream``, ``compile``, ``evaluate``, ``plan``,
    ``bench`` and ``rollout``::

        def apply(params, tokens, cache, lengths):
            x, call = params["embed"][tokens], kvjax.step(cache, tokens, lengths=lengths)
            ...                                       # layers, each with call.attend
            return logits, call.done()

        lm = kvjax.language_model(apply, config, params, tokenizer)

    Args:
      apply: a pure function ``(params, tokens, cache, lengths) -> (logits, cache)``. ``tokens``:
        int32[batch, new], right-padded. ``cache``: a ``KVCache``, or None to run without a cache
        (the returned cache is then ignored). ``lengths``: int32[batch], the number of real tokens
        per row, or None if all are real. Logits are [batch, new, vocab]. Two more parameters are
        optional. ``last_only`` is True if only the logits of each row's last real token are needed;
        they may then be [batch, 1, vocab]. ``max_len`` is the sequence length for rotary
        frequencies that depend on it, in passes without a cache. Programs are compiled once per
        function object, so don't define a new function for every call.
      config: an object or a mapping with ``num_hidden_layers``, ``num_key_value_heads``,
        ``head_dim`` and ``vocab_size``, as in Transformers, whose configs work too. ``dtype``, used
        for caches, defaults to the most common dtype of ``params``. Optional attributes are
        ``position_limit`` (the number of positions that the model supports), ``windows`` or
        ``layer_types``, and ``stacked`` (True if the model scans over its layers, and so needs
        stacked caches). ``plan`` also needs ``num_attention_heads`` and ``hidden_size``.
      params: a pytree of arrays.
      tokenizer: a tokenizer of kvjax, Transformers or ``tokenizers``, or any object with
        ``encode(text)`` and ``decode(ids)``; None if prompts are token ids.
      eos_token_ids: tokens that end a text; by default the config's ``eos_token_id``, if present.
      pad_token_id: the token that pads rows. Any token of the vocabulary works.
      specs: the ``PartitionSpec`` of each parameter over a mesh, as a pytree like ``params`` or a
        prefix of it. By default parameters are replicated.

    Raises:
      ValueError: if ``apply`` lacks a parameter or is not hashable, the config lacks a number, a
        token is not in the vocabulary, or ``params`` has no arrays.

    Example:
      ```python
      def apply(params, tokens, cache, lengths):
          call = kvjax.step(cache, tokens, lengths=lengths)
          x = params["embed"][tokens]
          q = x[:, None]  # one head: [batch, heads, new, head_dim]
          output, call = call.attend(0, q, q, q)
          return (x + output[:, 0]) @ params["embed"].T, call.done()


      config = dict(num_hidden_layers=1, num_key_value_heads=1, head_dim=8, vocab_size=97)
      model = kvjax.language_model(apply, config, {"embed": jnp.ones((97, 8))})
      result = kvjax.generate(model, [[5, 7, 11]], max_new_tokens=4)
      ```
    """
    own = _config(config, params)
    vocab = as_int("the config's vocab_size", own.vocab_size, 1)
    if eos_token_ids is None:
        eos_token_ids = getattr(own, "eos_token_id", None)
    ends = _ids(eos_token_ids)
    for token in (*ends, *_ids(pad_token_id)):
        if as_int("a token", token, 0) >= vocab:
            raise ValueError(f"token id {token} is out of range: the vocabulary has {vocab} tokens")
    name = getattr(apply, "__name__", type(apply).__name__)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    leaves, structure = jax.tree.flatten(shapes)
    model = FunctionModel(
        apply, vocab, _optional_parameters(apply, name), structure, tuple(leaves), own, specs
    )
    defaults = GenerationDefaults(eos_token_ids=ends, pad_token_id=pad_token_id)
    params = without_weak_types(params)
    return LanguageModel(own, params, as_tokenizer(tokenizer), defaults, model, source=name)


def _config(config: object, params: PyTree) -> Any:
    """Return the config of the decoder. If it has no dtype, one is added."""
    if isinstance(config, Mapping):
        config = SimpleNamespace(**config)
    config = decoder_config(config)
    layer_heads(config)
    if not hasattr(config, "vocab_size"):
        raise ValueError(f"config, a {type(config).__name__}, has no vocab_size")
    leaves = jax.tree.leaves(params)
    if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
        raise ValueError("params must be a pytree of arrays only")
    if getattr(config, "dtype", None) is not None:
        return config
    sizes: Counter[str] = Counter()
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            sizes[jnp.dtype(leaf.dtype).name] += leaf.size * leaf.dtype.itemsize
    # The dtype with the most bytes, since norms often have a wider one.
    return _ConfigWith(config, dtype=max(sizes, key=lambda name: sizes[name], default="float32"))


class _ConfigWith:
    """A config with additional attributes."""

    def __init__(self, config: object, **attributes: object) -> None:
        vars(self).update(attributes, _config=config)

    def get_text_config(self, decoder: bool = True) -> "_ConfigWith":
        """Return the config itself, which is already the decoder's."""
        return self

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._config, name)


def _optional_parameters(apply: ApplyFunction, name: str) -> tuple[str, ...]:
    """Return the names of the optional parameters that a function has.

    Raises:
      ValueError: if the function lacks a required parameter or is not hashable.
    """
    try:
        hash(apply)
        signature = inspect.signature(apply)
        signature.bind(*_REQUIRED)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be a hashable function of (params, tokens, cache, lengths): {error}"
        ) from None
    return tuple(name for name in _OPTIONAL if name in signature.parameters)


def _ids(tokens: int | Iterable[int] | None) -> tuple[int, ...]:
    if tokens is None:
        return ()
    return tuple(int(i) for i in tokens) if isinstance(tokens, Iterable) else (tokens,)


@dataclass(frozen=True, eq=False)
class FunctionModel:
    """A model whose computation is the user's function. It has the methods of
    ``kvjax.models.Architecture``.

    Two objects are equal if they have the same function and parameters of the same shapes, because
    these determine the traced programs. ``config`` and ``specs`` are not compared: they only
    determine caches and shardings, which are arguments of the programs.
    """

    function: ApplyFunction
    vocab: int
    optional: tuple[str, ...]
    structure: object
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    config: ModelConfig
    specs: PyTree

    in_one_piece = True
    """The model can't be split into layers."""

    def __post_init__(self) -> None:
        # Computed once, since every dispatch needs it and there may be many parameters.
        vars(self)["_hash"] = hash((self.function, self.vocab, self.structure, self.leaves))

    def __hash__(self) -> int:
        return int(vars(self)["_hash"])

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, FunctionModel):
            return self is other
        return (self.function, self.vocab, self.structure, self.leaves) == (
            other.function,
            other.vocab,
            other.structure,
            other.leaves,
        )

    def apply(
        self,
        params: PyTree,
        tokens: Tokens,
        cache: KVCache | None = None,
        *,
        lengths: Counts | None = None,
        last_only: bool = False,
        max_len: int | None = None,
    ) -> PyTree:
        """See ``kvjax.models.Architecture.apply``."""
        tokens = jnp.asarray(tokens)
        optional = {"last_only": last_only, "max_len": max_len}

        def run(
            tokens: Tokens, cache: KVCache | None, lengths: Counts | None
        ) -> tuple[Array, KVCache]:
            options = {name: optional[name] for name in self.optional}
            result = self.function(params, tokens, cache, lengths, **options)
            logits, after = self._check(result, tokens.shape, cache, last_only)
            if last_only and logits.shape[1] > 1:
                logits = _last_logits(logits, lengths)
            return logits.astype(jnp.float32), after

        if cache is None:
            return run(tokens, None, lengths)[0]
        return apply_in_chunks(run, tokens, cache, lengths, last_only=last_only, vocab=self.vocab)

    def abstract_params(self) -> PyTree:
        """Return the shapes and dtypes of the parameters."""
        return jax.tree.unflatten(self.structure, self.leaves)

    def param_shardings(self, mesh: Mesh | AbstractMesh) -> PyTree:
        """Return the sharding of each parameter over a mesh.

        Raises:
          ValueError: if the mesh has axes that ``kvjax.make_mesh`` does not create, or ``specs``
            does not match ``params``.
        """
        mesh_sharding = shard_over(mesh, common_heads(self.config))
        specs = PartitionSpec() if self.specs is None else self.specs
        shapes = self.abstract_params()
        try:
            specs = jax.tree.broadcast(specs, shapes, is_leaf=_is_spec)
        except ValueError as error:
            raise ValueError(f"the tree of specs does not match params: {error}") from None
        return jax.tree.map(mesh_sharding.sharding, specs, is_leaf=_is_spec)

    def _check(
        self, result: object, tokens: tuple[int, ...], cache: KVCache | None, last_only: bool
    ) -> tuple[Array, KVCache]:
        """Check the result of the function, and return it.

        Raises:
          ValueError: if the result is not logits of the right shape and the updated cache.
        """
        name = getattr(self.function, "__name__", type(self.function).__name__)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"{name} must return (logits, cache), got {_type(result)}")
        logits, after = result
        batch, new = tokens
        shapes = [(batch, new, self.vocab)] + [(batch, 1, self.vocab)] * last_only
        if getattr(logits, "shape", None) not in shapes:
            raise ValueError(
                f"the logits of {name} must be [batch={batch}, new={new}, vocab={self.vocab}], but "
                f"are {_type(logits)}"
            )
        if cache is None:
            return logits, after
        if isinstance(after, Step):
            raise ValueError(f"{name} returned the call instead of the cache: return call.done()")
        if not isinstance(after, KVCache):
            raise ValueError(f"{name} must return (logits, cache), but its cache is {_type(after)}")
        if after.pending is not None:
            raise ValueError(
                f"{name} returned a cache within a call: return call.done(), which ends the call"
            )
        if after.length is cache.length:
            raise ValueError(
                f"{name} returned its argument, without the call's tokens: return call.done()"
            )
        if jax.tree.structure(after) != jax.tree.structure(cache):
            raise ValueError(
                f"{name} returned another cache than its argument: the policies or the layers of "
                "stacks differ"
            )
        return logits, after


def _last_logits(logits: Array, lengths: Counts | None) -> Array:
    """Return the logits of each row's last real token, [batch, 1, vocab]."""
    if lengths is None:
        return logits[:, -1:]
    at = jnp.clip(jnp.asarray(lengths, jnp.int32) - 1, 0, logits.shape[1] - 1)
    return jnp.take_along_axis(logits, at[:, None, None], axis=1)


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)


def _type(x: Any) -> str:
    shape = getattr(x, "shape", None)
    if shape is not None:
        return f"{x.dtype.name}{list(shape)}"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    return f"a {type(x).__name__}"


def as_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """Wrap a tokenizer for use in generation. None and kvjax's tokenizers are returned unchanged.

    Raises:
      ValueError: if the tokenizer has no ``encode`` or ``decode``.
    """
    if tokenizer is None or hasattr(tokenizer, "stream"):
        return tokenizer
    for method in ("encode", "decode"):
        if not callable(getattr(tokenizer, method, None)):
            raise ValueError(f"the tokenizer, a {type(tokenizer).__name__}, has no {method}")
    return TokenizerAdapter(tokenizer)


class TokenizerAdapter:
    """A wrapper for a tokenizer that has ``encode(text)`` and ``decode(ids)``.

    It passes the keywords ``add_special_tokens`` and ``skip_special_tokens`` on if the tokenizer
    accepts them, as Transformers' tokenizers do.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._has_add = _has_parameter(tokenizer.encode, "add_special_tokens")
        self._has_skip = _has_parameter(tokenizer.decode, "skip_special_tokens")

    @property
    def pad_token_id(self) -> int | None:
        """The tokenizer's padding token, if it has one."""
        return getattr(self.tokenizer, "pad_token_id", None)

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        options = {"add_special_tokens": add_special_tokens} if self._has_add else {}
        encoding = self.tokenizer.encode(text, **options)
        return [int(i) for i in getattr(encoding, "ids", encoding)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        options = {"skip_special_tokens": skip_special_tokens} if self._has_skip else {}
        return str(self.tokenizer.decode([int(i) for i in ids], **options))

    def stream(self, after: Iterable[int] = (), /) -> TextStream:
        """Return a decoder that yields text as tokens arrive."""
        return TextStream(self.decode, after)


def _has_parameter(function: Callable[..., object], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # functions of compiled modules have no signature
        return True
