"""``LanguageModel``: a model with its parameters and its tokenizer."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, PyTree

from kvjax.core.array_folder import expand_user
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.transfer import put_on_mesh
from kvjax.core.validation import ArgumentError, as_list, is_traced, short_repr
from kvjax.generation.encoder import SOURCE, encode_source, has_encoded, refuse_auto, without_source
from kvjax.generation.model import GenerationDefaults, capacity_bucket
from kvjax.memory.sizes import has_encoder
from kvjax.placement.device import Device
from kvjax.placement.mesh import shard_over
from kvjax.policies.model_config import common_heads
from kvjax.policies.presets import PolicyChoice


def check_params_match(params: PyTree, own: PyTree, *, dtypes: bool = True) -> None:
    """Raise ``ValueError`` if parameters differ from a model's parameters ``own`` in names or
    shapes or, if ``dtypes`` is True, in dtypes."""
    if not all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(params)):
        raise ValueError("parameters must be a pytree of arrays only")
    if _forms(params, dtypes) == _forms(own, dtypes):
        return
    if isinstance(own, dict) and SOURCE in own and SOURCE not in params:
        raise ValueError(
            "the encoder has read its texts with other parameters: set the new ones first, then "
            "call lm.with_encoder_inputs(texts) again"
        )
    theirs, ours = _named(params), _named(own)
    for name in ours.keys() - theirs.keys():
        raise ValueError(f"the parameters lack {name}, which the model has")
    for name in theirs.keys() - ours.keys():
        raise ValueError(f"the parameters have {name}, which the model lacks")
    for name, leaf in ours.items():
        shape, expected = np.shape(theirs[name]), np.shape(leaf)
        if shape != expected:
            raise ArgumentError(
                f"{name} has shape {list(shape)}, but the model's is {list(expected)}",
                param="params",
            )
        dtype = theirs[name].dtype
        if dtypes and dtype != leaf.dtype:
            raise ArgumentError(
                f"{name} is {dtype}, but the model's is {leaf.dtype}: lm.put(params) casts it",
                param="params",
            )
    if jax.tree.structure(params) != jax.tree.structure(own):
        raise ValueError(
            f"the parameters, a {type(params).__name__}, have another structure than the model's, "
            f"a {type(own).__name__}"
        )


def without_weak_types(params: PyTree) -> PyTree:
    """Convert weakly typed parameters, such as ``jnp.full(shape, 0.5)``, to strongly typed ones. An
    optimizer returns strongly typed parameters. If the parameters before the first step were weakly
    typed, every program would be compiled again."""

    def convert(x: Array) -> Array:
        weak = isinstance(x, jax.Array) and jax.typeof(x).weak_type
        return lax.convert_element_type(x, x.dtype) if weak else x

    return jax.tree.map(convert, params)


def cast_params(params: PyTree, own: PyTree) -> PyTree:
    """Convert parameters to the dtypes of a model's parameters ``own``, and move them to the
    devices and shardings of ``own``. Nothing is moved if the parameters or ``own`` are traced, or
    if ``own`` has only shapes. Arrays that already have the dtype and the sharding are not
    copied."""
    check_params_match(params, own, dtypes=False)
    leaves, structure = jax.tree.flatten(params)
    targets = jax.tree.leaves(own)
    placed = [_placed_like(x, target) for x, target in zip(leaves, targets, strict=True)]
    different = [n for n, target in enumerate(targets) if placed[n].dtype != target.dtype]
    dtypes = tuple(targets[n].dtype for n in different)
    for n, x in zip(different, _cast([placed[n] for n in different], dtypes), strict=True):
        placed[n] = x
    return without_weak_types(structure.unflatten(placed))


def _placed_like(x: Array, target: Array) -> Array:
    if is_traced(x) or is_traced(target) or not isinstance(target, jax.Array):
        return x
    same_devices = isinstance(x, jax.Array) and x.sharding.device_set == target.sharding.device_set
    # An uncommitted array on the same device stays uncommitted.
    return x if same_devices and not target.committed else jax.device_put(x, target.sharding)


@functools.partial(jax.jit, static_argnums=1)
def _cast(arrays: list[jax.Array], dtypes: tuple[np.dtype, ...]) -> list[jax.Array]:
    return [x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]


def _forms(params: PyTree, dtypes: bool) -> tuple[object, ...]:
    """Return the structure, shapes and dtypes of parameters. Comparing these is faster than
    comparing names, and rollouts do it at every step."""
    leaves, structure = jax.tree.flatten(params)
    return structure, [(np.shape(x), x.dtype if dtypes else None) for x in leaves]


def _named(params: PyTree) -> dict[str, jax.Array]:
    """Return the arrays by name, such as ``layers.0.weight``."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model, its parameters and its tokenizer, which is all that text generation needs.

    Attributes:
      config: the model's sizes and settings.
      params: a pytree of arrays. Models of ``kvjax.models`` have nested dicts, whose keys are the
        parts of the tensor names in Transformers. Weights of linear layers are [out, in].
      tokenizer: the tokenizer; None for a model without one.
      generation: values of ``generation_config.json``.
      architecture: the model without its parameters. It is hashable, and a static argument for
        ``jit``.
      source: the checkpoint's folder, or another name of the model's origin.
      mesh: the devices over which the parameters are sharded; None for one device.

    Example:
      ```python
      lm = models.load()
      tokens, lengths = lm.encode(["The json module", "An iterator"])
      cache = kvjax.init_cache(lm.config, batch=2, max_len=64)
      step = jax.jit(lm.apply, donate_argnames="cache")
      logits, cache = step(lm.params, tokens, cache, lengths=lengths)
      ```
    """

    config: Any
    params: PyTree
    tokenizer: Any
    generation: GenerationDefaults
    architecture: Any
    source: str
    mesh: Mesh | None = None

    def __repr__(self) -> str:
        """Return the model's type and size, without its parameters."""
        config = self.config
        weights = without_source(self.params) if has_encoder(self) else self.params
        count = sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(weights))
        name = getattr(config, "model_type", "a custom model")
        return (
            f"LanguageModel({name}, {config.num_hidden_layers} layers, {count:,} parameters in "
            f"{config.dtype}, from {self.source})"
        )

    @without_mesh_context
    def on(self, mesh: Mesh) -> "LanguageModel":
        """Return the same model with its parameters sharded over a mesh.

        Raises:
          ValueError: if the mesh has axes that ``make_mesh`` does not create, or the model's
            encoder has already read texts.
        """
        if mesh == self.mesh:
            return self
        if has_encoded(self):
            raise ValueError(
                "the encoder's cache can't be moved: move the model first, then call "
                "lm.with_encoder_inputs(texts)"
            )
        params = jax.tree.map(put_on_mesh, self.params, self.architecture.param_shardings(mesh))
        return replace(self, params=params, mesh=mesh)

    def with_params(self, params: PyTree) -> "LanguageModel":
        """Return the same model with different parameters, for example after a training step.
        Nothing is copied or compiled again.

        Raises:
          ValueError: if names, shapes or dtypes differ. Use ``put`` to cast dtypes.
        """
        check_params_match(params, self.params)
        return replace(self, params=without_weak_types(params))

    def put(self, params: PyTree) -> PyTree:
        """Cast parameters to this model's dtypes, and move them to its devices and shardings. Use
        this for the parameters of a trainer, which may have wider dtypes or different shardings.

        Raises:
          ValueError: if names or shapes differ.
        """
        return cast_params(params, self.params)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint that ``kvjax.models.load`` and Transformers can read: the parameters,
        and the config, tokenizer and settings of the folder that the model was loaded from.

        Raises:
          ValueError: if the model was not loaded from a checkpoint, or the folder is not empty.
        """
        write = getattr(self.architecture, "save", None)
        if write is None:
            raise ValueError(
                "only models of kvjax.models can be saved as checkpoints: save lm.params of a "
                "custom model yourself"
            )
        write(self.params, Path(self.source), expand_user(folder))

    @without_mesh_context
    def with_encoder_inputs(
        self, texts: str | Sequence[str] | Sequence[Sequence[int]], cache: PolicyChoice = "static"
    ) -> "LanguageModel":
        """Run the encoder over texts, and return the same model with the encoder's output.

        Each row of the decoder attends to the output for its text. ``generate`` and ``stream`` call
        this method themselves. The output depends on the parameters, so call it again after a
        training step.

        Args:
          texts: as for ``encode``. A call of the decoder has one row per text, or the same number
            of consecutive rows for every text. On a mesh, empty rows are added until ``data``
            divides the number of rows.
          cache: a policy or its name, for the keys and values of cross-attention. Its codecs and
            placements are used, but not its layout.

        Raises:
          ValueError: if the model has no encoder, a text is empty, or the policy is ``Auto``.
        """
        if not has_encoder(self):
            raise ValueError("the model has no encoder: it reads prompts only")
        refuse_auto(cache)
        ids = self._ids(texts)
        if self.mesh is not None:
            ids += [[]] * (-len(ids) % shard_over(self.mesh, common_heads(self.config)).rows)
        tokens, lengths = self._put(ids, capacity_bucket(max(map(len, ids))))
        return replace(
            self, params=self.params | {SOURCE: encode_source(self, tokens, lengths, cache)}
        )

    @property
    def apply(self) -> Callable[..., PyTree]:
        """The function ``apply(params, tokens, cache=None, ...)``; see
        ``kvjax.models.Architecture.apply``."""
        return self.architecture.apply

    @without_mesh_context
    def encode(
        self, texts: str | Sequence[str] | Sequence[Sequence[int]]
    ) -> tuple[Int[Array, "batch new"], Int[Array, " batch"]]:
        """Return the token ids of texts, padded on the right.

        Args:
          texts: a text, a list of texts, or a list of lists of token ids.

        Returns:
          Tokens, int32[batch, new], and the number of real tokens in each row, int32[batch].

        Raises:
          ValueError: if the list is empty, a row has no tokens, an id is outside the vocabulary, or
            the model has no tokenizer for texts.
        """
        ids = self._ids(texts)
        return self._put(ids, max(map(len, ids)))

    def _ids(self, texts: str | Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
        expected = "a string, a list of strings, or a list of lists of token ids"
        rows = [texts] if isinstance(texts, str) else as_list("texts", texts, expected)
        if not rows:
            raise ValueError("nothing to encode: the list of texts is empty")
        return [self._row(number, row) for number, row in enumerate(rows)]

    def _put(
        self, ids: list[list[int]], width: int
    ) -> tuple[Int[Array, "batch width"], Int[Array, " batch"]]:
        """Put padded tokens and lengths on the devices of the parameters."""
        lengths = np.array([len(row) for row in ids], np.int32)
        tokens = np.full((len(ids), width), self.pad_token_id, np.int32)
        for number, row in enumerate(ids):
            tokens[number, : len(row)] = row
        arrays = jnp.asarray(tokens), jnp.asarray(lengths)
        if self.mesh is None:
            return Device().put(arrays)
        sharding = shard_over(self.mesh, common_heads(self.config))
        # Rows that can't be divided evenly are replicated.
        spec = sharding.row_spec() if len(ids) % sharding.rows == 0 else PartitionSpec()
        return sharding.put(arrays, lambda shape: spec)

    def _row(self, number: int, row: str | Sequence[int]) -> list[int]:
        ids = self._need_tokenizer().encode(row) if isinstance(row, str) else _ints(row)
        if not ids:
            raise ValueError(f"prompt {number} is empty: it has no tokens")
        self.check_ids(ids)
        return ids

    @property
    def pad_token_id(self) -> int:
        """The token that pads rows. It has no effect on results."""
        pad = self.generation.pad_token_id
        if pad is None:
            pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad if pad is not None and pad < self.config.vocab_size else 0

    @property
    def decoder_start_token_id(self) -> int:
        """The first token of an encoder-decoder model's decoder. It is the checkpoint's
        ``decoder_start_token_id``, or else its BOS token, or else its padding token."""
        candidates = self.generation.decoder_start_token_id, self.generation.bos_token_id
        return next((token for token in candidates if token is not None), self.pad_token_id)

    def check_ids(self, ids: Iterable[int]) -> None:
        """Check that token ids are in the model's vocabulary.

        Raises:
          ValueError: if an id is not. The message has the id and the size of the vocabulary.
        """
        for i in ids:
            if not 0 <= i < self.config.vocab_size:
                raise ValueError(
                    f"token id {i} is out of range: the vocabulary has {self.config.vocab_size} "
                    f"tokens, 0 to {self.config.vocab_size - 1}"
                )

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of one row of token ids.

        Raises:
          ValueError: if the model has no tokenizer, or ``ids`` is not one row.
        """
        return self._need_tokenizer().decode(_ints(ids), skip_special_tokens=skip_special_tokens)

    def chat(self, messages: Sequence[Mapping[str, object]], **options: object) -> list[int]:
        """Return the token ids of a conversation, up to where the answer begins; see
        ``kvjax.models.Tokenizer.chat``.

        Raises:
          ValueError: if the model has no tokenizer or no chat template, or the template rejects the
            messages.
        """
        tokenizer = self._need_tokenizer()
        if not hasattr(tokenizer, "chat"):
            raise ValueError(f"the tokenizer, a {type(tokenizer).__name__}, has no chat template")
        return tokenizer.chat(messages, **options)

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"{self.source} has no tokenizer: give token ids instead of text")
        return self.tokenizer


def _ints(ids: Iterable[int]) -> list[int]:
    """Convert one row of token ids to Python ints."""
    try:
        values = np.asarray(jax.device_get(ids) if isinstance(ids, jax.Array) else list(ids))
    except (TypeError, ValueError):
        values = np.asarray(None)
    if values.ndim != 1 or (values.size and not np.issubdtype(values.dtype, np.integer)):
        raise ValueError(
            f"expected one row of token ids, got {type(ids).__name__}: {short_repr(ids)}"
        )
    return [int(i) for i in values]
