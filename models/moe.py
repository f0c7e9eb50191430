"""Experts in files: a tensor of each, or one of all that joins two matrices.

Here each of the three matrices of a layer's experts is one array [experts, out, in], read at once
and put together as it is read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.core.errors import CheckpointError

from . import decoder
from .config import DecoderConfig, Gemma4Config, MoeConfig
from .layers import ACTIVATIONS, Hidden, Linear, contract_last, normal
from .stored import Stored, StoredTensor

Form = Literal["apart", "joined", "stacked"]
"""How published files have experts: one by one, or all of a layer, gate before up: joined ones as
[experts, in, out], stacked ones as [experts, out, in]. Those that have them apart may also be saved
stacked."""

_ONE = re.compile(r"^(.*\bexperts)\.(\d+)\.(.+)$")
_ALL = re.compile(r"^(.*\bexperts)\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class _Stack(StoredTensor):
    """The same matrix of all experts."""

    parts: tuple[StoredTensor, ...]

    def read(self) -> np.ndarray:
        first = self.parts[0].read()
        whole = np.empty(self.shape, first.dtype)
        whole[0] = first
        for place, part in zip(whole[1:], self.parts[1:], strict=True):
            place[...] = part.read()
        return whole


@dataclass(frozen=True)
class _Part(StoredTensor):
    """Rows of all experts, of a tensor that joins two matrices, or that has [in, out]."""

    joined: StoredTensor
    turned: bool
    first_row: int

    def read(self) -> np.ndarray:
        whole = self.joined.read()
        whole = whole.swapaxes(1, 2) if self.turned else whole
        return whole[:, self.first_row : self.first_row + self.shape[1]]


def stack_experts(stored: Stored, form: Form) -> Stored:
    """The tensors, those of experts as ``<...>.experts.<matrix>.weight`` [experts, out, in].

    Raises:
      CheckpointError: if an expert lacks a matrix that others have, or has it in another shape or
        dtype.
    """
    result: Stored = {}
    experts: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in stored.items():
        if found := _ONE.match(name):
            stack, number, matrix = found.groups()
            experts.setdefault(f"{stack}.{matrix}", {})[int(number)] = tensor
        elif (found := _ALL.match(name)) and len(tensor.shape) == 3:
            halves = ("gate_proj", "up_proj") if found[2] == "gate_up_proj" else ("down_proj",)
            parts = _parted(tensor, len(halves), form == "joined")
            result |= {
                f"{found[1]}.{half}.weight": part for half, part in zip(halves, parts, strict=True)
            }
        else:
            result[name] = tensor
    return result | {name: _stacked(name, parts) for name, parts in experts.items()}


def unstack_experts(
    tensors: dict[str, np.ndarray], form: Form | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters as files have them: each in a tensor of its own, but of experts."""
    for name, values in tensors.items():
        stack, inside, matrix = name.partition(".experts.")
        if form is None or not inside:
            yield name, values
        elif form == "apart":
            for number, each in enumerate(values):
                yield f"{stack}.experts.{number}.{matrix}", each
        elif matrix == "down_proj.weight":
            yield f"{stack}.experts.down_proj", _written(values, form)
        elif matrix == "gate_proj.weight":
            both = np.concatenate([values, tensors[f"{stack}.experts.up_proj.weight"]], axis=1)
            yield f"{stack}.experts.gate_up_proj", _written(both, form)


def _written(values: np.ndarray, form: Form) -> np.ndarray:
    return np.ascontiguousarray(values.swapaxes(1, 2)) if form == "joined" else values


def _parted(tensor: StoredTensor, count: int, turned: bool) -> Iterator[_Part]:
    experts, rows, columns = tensor.shape
    if turned:
        rows, columns = columns, rows
    rows //= count
    for number in range(count):
        yield _Part(
            tensor.file, tensor.name, tensor.dtype, (experts, rows, columns), tensor.start,
            tensor.count // count, tensor, turned, number * rows,
        )  # fmt: skip


def _stacked(name: str, parts: dict[int, StoredTensor]) -> _Stack:
    count, first = max(parts) + 1, parts[min(parts)]
    for number in range(count):
        part = parts.get(number)
        if part is None:
            raise CheckpointError(f"{first.file}: missing tensor {name} of expert {number}")
        if (part.shape, part.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{part.file}: the tensor {part.name} is {part.dtype} {list(part.shape)}; expected "
                f"{first.dtype} {list(first.shape)}, as of the other experts"
            )
    tensors = tuple(parts[number] for number in range(count))
    size, shape = sum(part.count for part in tensors), (count, *first.shape)
    return _Stack(first.file, name, first.dtype, shape, first.start, size, tensors)


Rows = Float[Array, "tokens hidden"]


class Matrices(nnx.Module):
    """One matrix of every expert: ``weight`` [experts, out, in]."""

    def __init__(self, experts: int, fan_in: int, fan_out: int, *, dtype: str, rngs: nnx.Rngs):
        self.weight = nnx.Param(normal(rngs, (experts, fan_out, fan_in), dtype))


class Experts(nnx.Module):
    """``down(act(gate(x)) * up(x))`` of many experts.

    Few tokens read the matrices that they chose alone, which are copied for it; where there are at
    least as many choices as experts, every expert takes all tokens, one expert after the other:
    ``num_experts / num_experts_per_tok`` times the products that are needed, and no more memory
    than one expert's. ``scales_inputs``: parts multiply what an expert takes, not what it gives.
    """

    def __init__(
        self, config: MoeConfig | Gemma4Config, *, scales_inputs: bool = False, rngs: nnx.Rngs
    ):
        self.activation, self.scales_inputs = ACTIVATIONS[config.hidden_act], scales_inputs
        hidden, inner = config.hidden_size, config.moe_intermediate_size

        def matrices(fan_in: int, fan_out: int) -> Matrices:
            return Matrices(config.num_experts, fan_in, fan_out, dtype=config.dtype, rngs=rngs)

        self.gate_proj = matrices(hidden, inner)
        self.up_proj = matrices(hidden, inner)
        self.down_proj = matrices(inner, hidden)

    def __call__(
        self, x: Rows, chosen: Int[Array, "tokens choices"], parts: Float[Array, "tokens choices"]
    ) -> Rows:
        """The sum of the chosen experts, weighted by ``parts`` (float32)."""
        weights = tuple(each.weight[...] for each in (self.gate_proj, self.up_proj, self.down_proj))
        few = chosen.size < weights[0].shape[0]
        return (self._few if few else self._many)(x, weights, chosen, parts).astype(x.dtype)

    def _scales(self, parts: Array) -> tuple[Array, Array]:
        """What an expert's inputs and outputs are multiplied by."""
        ones = jnp.ones_like(parts)
        return (parts, ones) if self.scales_inputs else (ones, parts)

    def _few(self, x: Rows, weights: Any, chosen: Array, parts: Array) -> Rows:
        gate, up, down = (weight[chosen] for weight in weights)

        def products(y: Array, each: Array) -> Array:
            found = jnp.einsum("tki,tkoi->tko", y, each, preferred_element_type=jnp.float32)
            return found.astype(x.dtype)

        before, behind = self._scales(parts[..., None])
        y = (x[:, None].astype(before.dtype) * before).astype(x.dtype)
        y = self.activation(products(y, gate)) * products(y, up)
        return jnp.sum(products(y, down).astype(jnp.float32) * behind, axis=1)

    def _many(self, x: Rows, weights: Any, chosen: Array, parts: Array) -> Rows:
        tokens, experts = x.shape[0], weights[0].shape[0]
        rows = jnp.arange(tokens, dtype=jnp.int32)[:, None]
        shares = jnp.zeros((tokens, experts), jnp.float32).at[rows, chosen].set(parts)

        def add(total: Array, one: Any) -> tuple[Array, None]:
            (gate, up, down), share = one
            before, behind = self._scales(share[:, None])
            y = (x.astype(before.dtype) * before).astype(x.dtype)
            gated = self.activation(contract_last(y, gate).astype(x.dtype))
            y = gated * contract_last(y, up).astype(x.dtype)
            y = contract_last(y, down).astype(x.dtype).astype(jnp.float32) * behind
            # What no one chose may be infinite, and would be NaN times 0.
            return total + jnp.where(share[:, None] != 0, y, 0), None

        return lax.scan(add, jnp.zeros(x.shape, jnp.float32), (weights, shares.T))[0]


class SparseFeedForward(nnx.Module):
    """A router, ``gate``, and the experts that it chooses among."""

    def __init__(self, config: MoeConfig, *, rngs: nnx.Rngs):
        self.choices, self.norm = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Linear(
            config.hidden_size, config.num_experts, bias=False, dtype=config.dtype, rngs=rngs
        )
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: Hidden) -> Hidden:
        rows = x.reshape(-1, x.shape[-1])
        chances = jax.nn.softmax(self.gate(rows).astype(jnp.float32), axis=-1)
        parts, chosen = lax.top_k(chances, self.choices)
        if self.norm:
            parts = parts / jnp.sum(parts, axis=-1, keepdims=True)
        return self.experts(rows, chosen, parts).reshape(x.shape)


class Block(decoder.Block):
    """One layer; some have a feed-forward part without experts."""

    def make_feed_forward(
        self, config: DecoderConfig, layer: int, rngs: nnx.Rngs
    ) -> decoder.Feeding:
        assert isinstance(config, MoeConfig)
        if layer in config.dense_layers:
            return super().make_feed_forward(config, layer, rngs)
        return SparseFeedForward(config, rngs=rngs)


class Moe(decoder.Decoder):
    """A decoder with experts, and its language-model head; experts are divided as one is."""

    block: ClassVar = Block
