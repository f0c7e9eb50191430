"""``LanguageModel``: a model with its parameters and tokenizer."""

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
from jaxtyping import Array, Int

from kvjax.core.array_folder import expand_user
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.transfer import put_on_mesh
from kvjax.core.validation import as_list, is_traced, short_repr
from kvjax.generation.capacity import capacity_bucket
from kvjax.generation.encoder import SOURCE, encode_source, has_encoded, refuse_auto, without_source
from kvjax.generation.model import GenerationDefaults
from kvjax.memory.sizes import has_encoder
from kvjax.placement.device import Device
from kvjax.placement.mesh import shard_over
from kvjax.policies.model_config import common_heads
from kvjax.policies.presets import PolicyChoice


def check_params_match(params: Any, own: Any, *, dtypes: bool = True) -> None:
    """Raise ``ValueError`` if parameters are not of the names and shapes of a model's own, and with
    ``dtypes`` of their dtypes."""
    if not all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(params)):
        raise ValueError("parameters must be a tree of arrays, with nothing else in it")
    if _forms(params, dtypes) == _forms(own, dtypes):
        return
    if isinstance(own, dict) and SOURCE in own and SOURCE not in params:
        raise ValueError(
            "what the encoder has read goes by the parameters that it had: give others to the "
            "model before it reads, and let it read again"
        )
    theirs, ours = _named(params), _named(own)
    for name in ours.keys() - theirs.keys():
        raise ValueError(f"the parameters lack {name}, which the model's own have")
    for name in theirs.keys() - ours.keys():
        raise ValueError(f"the parameters have {name}, which the model's own have not")
    for name, leaf in ours.items():
        found, wanted = np.shape(theirs[name]), np.shape(leaf)
        if found != wanted:
            raise ValueError(f"{name} is {list(found)}, and {list(wanted)} in the model's own")
        other, dtype = theirs[name].dtype, leaf.dtype
        if dtypes and other != dtype:
            raise ValueError(
                f"{name} is {other}, and {dtype} in the model's own: lm.put(params) casts them"
            )
    if jax.tree.structure(params) != jax.tree.structure(own):
        raise ValueError(
            f"the parameters are a {type(params).__name__} of another structure than the model's "
            f"own, a {type(own).__name__}"
        )


def without_weak_types(params: Any) -> Any:
    """Parameters without weak types, such as that of ``jnp.full(shape, 0.5)``: an optimizer returns
    strongly typed ones, which would compile every program again."""
    return jax.tree.map(_strong, params)


def _strong(x: Any) -> Any:
    weak = isinstance(x, jax.Array) and jax.typeof(x).weak_type
    return lax.convert_element_type(x, x.dtype) if weak else x


def cast_params(params: Any, own: Any) -> Any:
    """Parameters in the dtypes of a model's own and, where these are arrays, where they are. What
    is so already is not copied."""
    check_params_match(params, own, dtypes=False)
    leaves, structure = jax.tree.flatten(params)
    wanted = jax.tree.leaves(own)
    placed = [_there(x, to) for x, to in zip(leaves, wanted, strict=True)]
    other = [n for n, to in enumerate(wanted) if placed[n].dtype != to.dtype]
    dtypes = tuple(wanted[n].dtype for n in other)
    for n, x in zip(other, _cast([placed[n] for n in other], dtypes), strict=True):
        placed[n] = x
    return without_weak_types(structure.unflatten(placed))


def _there(x: Any, to: Any) -> Any:
    """An array where another one is, if both are somewhere."""
    if is_traced(x) or is_traced(to) or not isinstance(to, jax.Array):
        return x
    here = isinstance(x, jax.Array) and x.sharding.device_set == to.sharding.device_set
    # What is uncommitted, and on the same device, stays so.
    return x if here and not to.committed else jax.device_put(x, to.sharding)


@functools.partial(jax.jit, static_argnums=1)
def _cast(arrays: list[Any], dtypes: tuple[Any, ...]) -> list[Any]:
    return [x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]


def _forms(params: Any, dtypes: bool) -> tuple[Any, ...]:
    """What is compared, without names, which take longer: of every rollout."""
    leaves, structure = jax.tree.flatten(params)
    return structure, [(np.shape(x), x.dtype if dtypes else None) for x in leaves]


def _named(params: Any) -> dict[str, Any]:
    """The arrays, each by its way from the top."""
    found = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model and all that is needed to turn text into text.

    ``config``: its numbers. ``params``: a tree of arrays; of ``kvjax.models`` nested dicts, whose
    keys are the parts of the tensors' names in Transformers, and all weights of linear layers are
    [out, in].
    ``architecture``: the model without its parameters, hashable: the static argument for ``jit``.
    ``tokenizer``: None where there is none. ``source``: where it came from, a checkpoint's folder.
    ``mesh``: the devices that the parameters are spread over, None for one.
    """

    config: Any
    params: Any
    tokenizer: Any
    generation: GenerationDefaults
    architecture: Any
    source: str
    mesh: Mesh | None = None

    def __repr__(self) -> str:
        """What it is, not its parameters."""
        config = self.config
        weights = without_source(self.params) if has_encoder(self) else self.params
        count = sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(weights))
        name = getattr(config, "model_type", "a model of one's own")
        return (
            f"LanguageModel({name}, {config.num_hidden_layers} layers, {count:,} parameters in "
            f"{config.dtype}, from {self.source})"
        )

    @without_mesh_context
    def on(self, mesh: Mesh) -> "LanguageModel":
        """The same model with its parameters spread over a mesh; itself, if they are.

        Raises:
          ValueError: if the mesh has other axes than ``make_mesh`` gives, or an encoder has read.
        """
        if mesh == self.mesh:
            return self
        if has_encoded(self):
            raise ValueError(
                "what the encoder has read is where the model was: move that first, and let it "
                "read there"
            )
        params = jax.tree.map(put_on_mesh, self.params, self.architecture.param_shardings(mesh))
        return replace(self, params=params, mesh=mesh)

    def with_params(self, params: Any) -> "LanguageModel":
        """The same model with other parameters, such as those after a step of training: nothing is
        copied, and nothing compiled again.

        Raises:
          ValueError: if they are not of the same names, shapes and dtypes; ``put`` casts them.
        """
        check_params_match(params, self.params)
        return replace(self, params=without_weak_types(params))

    def put(self, params: Any) -> Any:
        """Parameters of the same names and shapes, as this model has its own: in its dtypes, on its
        devices, divided as they are there. For a trainer's, which are wider or divided otherwise.

        Raises:
          ValueError: if names or shapes are not the same.
        """
        return cast_params(params, self.params)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint that ``kvjax.models.load`` and Transformers read: the parameters, and
        config, tokenizer and settings of the folder that the model came from.

        Raises:
          ValueError: if it did not come from a checkpoint; if the folder is there and not empty.
        """
        write = getattr(self.architecture, "save", None)
        if write is None:
            raise ValueError(
                "only models of kvjax.models are saved as checkpoints: save lm.params of your own "
                "as you save them elsewhere"
            )
        write(self.params, Path(self.source), expand_user(folder))

    @without_mesh_context
    def reading(
        self,
        texts: str | Sequence[str] | Sequence[Sequence[int]],
        cache: PolicyChoice = "static",
    ) -> "LanguageModel":
        """The same model with texts that its encoder has read, once: what is written by its decoder
        goes by them, row by row. ``generate`` and ``stream`` do this themselves.

        Args:
          texts: as of ``encode``. Calls have a row for each, or the same number of rows one behind
            the other; on a mesh those that ``data`` does not divide are filled up with empty ones.
          cache: a policy or its name: how the keys and values are kept that are attended to
            across. Codecs and places count, a layout does not.

        What is read goes by the parameters: after a step of training it is read again.

        Raises:
          ValueError: if the model has no encoder, a text is empty, or the policy is ``Auto``.
        """
        if not has_encoder(self):
            raise ValueError("the model has no encoder: what it reads is its prompt")
        refuse_auto(cache)
        ids = self._ids(texts)
        if self.mesh is not None:
            # Rows that `data` does not divide are filled up with empty ones.
            ids += [[]] * (-len(ids) % shard_over(self.mesh, common_heads(self.config)).rows)
        tokens, lengths = self._put(ids, capacity_bucket(max(map(len, ids))))
        return replace(
            self, params=self.params | {SOURCE: encode_source(self, tokens, lengths, cache)}
        )

    @property
    def apply(self) -> Callable[..., Any]:
        """``apply(params, tokens, cache=None, ...)``; see ``kvjax.models.Architecture.apply``."""
        return self.architecture.apply

    @without_mesh_context
    def encode(
        self, texts: str | Sequence[str] | Sequence[Sequence[int]]
    ) -> tuple[Int[Array, "batch new"], Int[Array, " batch"]]:
        """Token ids of texts, padded on the right.

        Args:
          texts: a text, a list of texts, or a list of lists of token ids.

        Returns:
          int32[batch, new] and int32[batch], how many of each row are real.

        Raises:
          ValueError: if there are no texts, a row has no tokens, an id is not in the vocabulary,
            or texts are given and there is no tokenizer.
        """
        ids = self._ids(texts)
        return self._put(ids, max(map(len, ids)))

    def _ids(self, texts: str | Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
        wanted = "a text, or a list of texts or of lists of token ids"
        rows = [texts] if isinstance(texts, str) else as_list("texts", texts, wanted)
        if not rows:
            raise ValueError("there is nothing to encode: the list of texts is empty")
        return [self._row(number, row) for number, row in enumerate(rows)]

    def _put(
        self, ids: list[list[int]], width: int
    ) -> tuple[Int[Array, "batch width"], Int[Array, " batch"]]:
        """Tokens where the parameters are, and how many of each row are real."""
        lengths = np.array([len(row) for row in ids], np.int32)
        tokens = np.full((len(ids), width), self.padding, np.int32)
        for number, row in enumerate(ids):
            tokens[number, : len(row)] = row
        found = jnp.asarray(tokens), jnp.asarray(lengths)
        if self.mesh is None:
            return Device().put(found)
        spread = shard_over(self.mesh, common_heads(self.config))
        # Rows that come out uneven are everywhere.
        shares = spread.row_spec() if len(ids) % spread.rows == 0 else PartitionSpec()
        return spread.put(found, lambda shape: shares)

    def _row(self, number: int, row: str | Sequence[int]) -> list[int]:
        ids = self._need_tokenizer().encode(row) if isinstance(row, str) else _ints(row)
        if not ids:
            raise ValueError(f"prompt {number} is empty: it has no tokens to continue from")
        self.check_ids(ids)
        return ids

    @property
    def padding(self) -> int:
        """The token that stands behind the real ones of a row: which one does not matter."""
        pad = self.generation.pad_token_id
        if pad is None:
            pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad if pad is not None and pad < self.config.vocab_size else 0

    @property
    def start_token(self) -> int:
        """What a decoder behind an encoder begins with: as told, or the first token, or padding."""
        told = self.generation.start_token_id, self.generation.bos_token_id
        return next((token for token in told if token is not None), self.padding)

    def check_ids(self, ids: Iterable[int]) -> None:
        """Check that token ids are in the model's vocabulary.

        Raises:
          ValueError: naming the first that is not, and the vocabulary's size.
        """
        for i in ids:
            if not 0 <= i < self.config.vocab_size:
                raise ValueError(
                    f"token id {i} is out of range: the vocabulary has {self.config.vocab_size} "
                    f"tokens, 0 to {self.config.vocab_size - 1}"
                )

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of one row of token ids, without padding.

        Raises:
          ValueError: if there is no tokenizer, or ``ids`` is not one row.
        """
        return self._need_tokenizer().decode(_ints(ids), skip_special_tokens=skip_special_tokens)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation, ready to be answered; see ``kvjax.models.Tokenizer.chat``.

        Raises:
          ValueError: if there is no tokenizer or no chat template, or it refuses the messages.
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
    """One row of token ids as Python ints."""
    try:
        values = np.asarray(jax.device_get(ids) if isinstance(ids, jax.Array) else list(ids))
    except (TypeError, ValueError):
        values = np.asarray(None)
    if values.ndim != 1 or (values.size and not np.issubdtype(values.dtype, np.integer)):
        raise ValueError(
            f"expected one row of token ids, got {type(ids).__name__}: {short_repr(ids)}"
        )
    return [int(i) for i in values]
