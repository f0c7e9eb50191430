"""Mixture-of-experts models such as Mixtral and Llama 4, and how files store experts.

Files store one tensor per expert and matrix, or stacked tensors in which the gate and up
projections are fused. In kvjax, each of the three matrices of a layer is one array [experts, out,
in], assembled when the files are read.

The text part of Llama 4 (Meta, "The Llama 4 herd", 2025) has routed experts with a shared expert.
Queries in layers with rotary positions see only their own chunk. The other layers have no rotary
positions and full attention, and scale their queries up with the position to keep attention sharp
in long sequences (Nakanishi, arXiv:2501.19399).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.core.validation import CheckpointError

from . import decoder
from .config import DecoderConfig
from .config_gemma import Gemma4Config
from .config_moe import Llama4Config, MoeConfig
from .files import Stored, StoredTensor
from .frame import LayerContext
from .layers import ACTIVATIONS, FeedForward, Hidden, Linear, contract_last, normal, unit

Form = Literal["apart", "joined", "stacked"]
"""How published files store experts.

With ``apart``, there is one tensor per expert. Such models may also be saved ``stacked``. With
``stacked``, there is one tensor for all experts of a layer, [experts, out, in], with gate and up
fused in this order. ``joined`` is like ``stacked``, but transposed to [experts, in, out].
"""

_ONE = re.compile(r"^(.*\bexperts)\.(\d+)\.(.+)$")
_ALL = re.compile(r"^(.*\bexperts)\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class _Stack(StoredTensor):
    """One matrix of all experts, stored as one tensor per expert."""

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
    """Rows of all experts from a stacked tensor that is fused or transposed."""

    joined: StoredTensor
    transposed: bool
    first_row: int

    def read(self) -> np.ndarray:
        whole = self.joined.read()
        whole = whole.swapaxes(1, 2) if self.transposed else whole
        return whole[:, self.first_row : self.first_row + self.shape[1]]


def stack_experts(stored: Stored, form: Form) -> Stored:
    """Combine expert tensors into ``<...>.experts.<matrix>.weight`` [experts, out, in].

    Raises:
      CheckpointError: if an expert lacks a matrix that other experts have, or if its shape or dtype
        differs from theirs.
    """
    result: Stored = {}
    experts: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in stored.items():
        if match := _ONE.match(name):
            stack, number, matrix = match.groups()
            experts.setdefault(f"{stack}.{matrix}", {})[int(number)] = tensor
        elif (match := _ALL.match(name)) and len(tensor.shape) == 3:
            halves = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
            parts = _split_fused(tensor, len(halves), form == "joined")
            result |= {
                f"{match[1]}.{half}.weight": part for half, part in zip(halves, parts, strict=True)
            }
        else:
            result[name] = tensor
    return result | {name: _stacked(name, parts) for name, parts in experts.items()}


def unstack_experts(
    tensors: dict[str, np.ndarray], form: Form | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Convert the stacked parameters of experts to the format of files."""
    for name, values in tensors.items():
        stack, inside, matrix = name.partition(".experts.")
        if form is None or not inside:
            yield name, values
        elif form == "apart":
            for number, expert in enumerate(values):
                yield f"{stack}.experts.{number}.{matrix}", expert
        elif matrix == "down_proj.weight":
            yield f"{stack}.experts.down_proj", _written(values, form)
        elif matrix == "gate_proj.weight":
            both = np.concatenate([values, tensors[f"{stack}.experts.up_proj.weight"]], axis=1)
            yield f"{stack}.experts.gate_up_proj", _written(both, form)


def _written(values: np.ndarray, form: Form) -> np.ndarray:
    return np.ascontiguousarray(values.swapaxes(1, 2)) if form == "joined" else values


def _split_fused(tensor: StoredTensor, count: int, transposed: bool) -> Iterator[_Part]:
    experts, rows, columns = tensor.shape
    if transposed:
        rows, columns = columns, rows
    rows //= count
    for number in range(count):
        yield _Part(
            tensor.file, tensor.name, tensor.dtype, (experts, rows, columns), tensor.start,
            tensor.count // count, tensor, transposed, number * rows,
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
                f"{first.dtype} {list(first.shape)}, like the other experts"
            )
    tensors = tuple(parts[number] for number in range(count))
    size, shape = sum(part.count for part in tensors), (count, *first.shape)
    return _Stack(first.file, name, first.dtype, shape, first.start, size, tensors)


Rows = Float[Array, "tokens hidden"]


class Matrices(nnx.Module):
    """One matrix of every expert. ``weight`` is [experts, out, in]."""

    def __init__(self, experts: int, fan_in: int, fan_out: int, *, dtype: str, rngs: nnx.Rngs):
        self.weight = nnx.Param(normal(rngs, (experts, fan_out, fan_in), dtype))


class Experts(nnx.Module):
    """Experts that each compute ``down(act(gate(x)) * up(x))``.

    If the tokens select fewer (token, expert) pairs than there are experts, the weights of the
    selected experts are gathered. Otherwise a scan applies every expert to all tokens. The scan
    computes ``num_experts / num_experts_per_tok`` times the necessary products, but needs temporary
    memory for only one expert.

    With ``scales_inputs``, the routing weights scale the experts' inputs instead of their outputs.
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
        """Sum the selected experts' outputs, weighted by ``parts`` (float32)."""
        weights = tuple(each.weight[...] for each in (self.gate_proj, self.up_proj, self.down_proj))
        few = chosen.size < weights[0].shape[0]
        return (self._few if few else self._many)(x, weights, chosen, parts).astype(x.dtype)

    def _scales(self, parts: Array) -> tuple[Array, Array]:
        """Return the scales of an expert's inputs and outputs."""
        ones = jnp.ones_like(parts)
        return (parts, ones) if self.scales_inputs else (ones, parts)

    def _few(self, x: Rows, weights: tuple[Array, ...], chosen: Array, parts: Array) -> Rows:
        gate, up, down = (weight[chosen] for weight in weights)

        def products(y: Array, each: Array) -> Array:
            result = jnp.einsum("tki,tkoi->tko", y, each, preferred_element_type=jnp.float32)
            return result.astype(x.dtype)

        before, after = self._scales(parts[..., None])
        y = (x[:, None].astype(before.dtype) * before).astype(x.dtype)
        y = self.activation(products(y, gate)) * products(y, up)
        return jnp.sum(products(y, down).astype(jnp.float32) * after, axis=1)

    def _many(self, x: Rows, weights: tuple[Array, ...], chosen: Array, parts: Array) -> Rows:
        tokens, experts = x.shape[0], weights[0].shape[0]
        rows = jnp.arange(tokens, dtype=jnp.int32)[:, None]
        shares = jnp.zeros((tokens, experts), jnp.float32).at[rows, chosen].set(parts)

        def add(total: Array, one: tuple[tuple[Array, ...], Array]) -> tuple[Array, None]:
            (gate, up, down), share = one
            before, after = self._scales(share[:, None])
            y = (x.astype(before.dtype) * before).astype(x.dtype)
            gated = self.activation(contract_last(y, gate).astype(x.dtype))
            y = gated * contract_last(y, up).astype(x.dtype)
            y = contract_last(y, down).astype(x.dtype).astype(jnp.float32) * after
            # The output for tokens that did not select this expert may be infinite: 0 * inf is NaN.
            return total + jnp.where(share[:, None] != 0, y, 0), None

        return lax.scan(add, jnp.zeros(x.shape, jnp.float32), (weights, shares.T))[0]


class SparseFeedForward(nnx.Module):
    """A top-k router (``gate``) and its experts."""

    def __init__(self, config: MoeConfig, *, rngs: nnx.Rngs):
        self.choices, self.norm = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Linear(
            config.hidden_size, config.num_experts, bias=False, dtype=config.dtype, rngs=rngs
        )
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: Hidden) -> Hidden:
        rows = x.reshape(-1, x.shape[-1])
        probabilities = jax.nn.softmax(self.gate(rows).astype(jnp.float32), axis=-1)
        parts, chosen = lax.top_k(probabilities, self.choices)
        if self.norm:
            parts = parts / jnp.sum(parts, axis=-1, keepdims=True)
        return self.experts(rows, chosen, parts).reshape(x.shape)


class Block(decoder.Block):
    """One layer. The layers in ``dense_layers`` have a feed-forward module without experts."""

    def make_feed_forward(
        self, config: DecoderConfig, layer: int, rngs: nnx.Rngs
    ) -> decoder.FeedForwardModule:
        assert isinstance(config, MoeConfig)
        if layer in config.dense_layers:
            return super().make_feed_forward(config, layer, rngs)
        return SparseFeedForward(config, rngs=rngs)


class Moe(decoder.Decoder):
    """A mixture-of-experts decoder with its language-model head.

    On a mesh, each expert's weights are sharded like those in a dense feed-forward layer.
    """

    block: ClassVar = Block


class Llama4Attention(decoder.Attention):
    """Attention of one layer: chunked with rotary positions, or full without them."""

    def __init__(self, config: Llama4Config, layer: int, *, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs=rngs)
        self.epsilon, self.temperature = config.rms_norm_eps, config.attn_temperature
        self.rotated = config.ropes[layer] is not None
        self.unit = self.rotated and config.use_qk_norm

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        config, layer = self.config, self.layer
        queries, keys, values = self.heads(x)
        if not self.rotated and self.temperature is not None:
            factor, step = self.temperature
            steps = jnp.floor((context.step.positions.astype(jnp.float32) + 1) / step)
            growth = jnp.log1p(steps) * factor + 1
            queries = (queries * growth[:, None, :, None]).astype(queries.dtype)
        if self.unit:
            # Rotation preserves the norm, so normalizing before the rotation is equivalent.
            queries, keys = (unit(x, self.epsilon).astype(x.dtype) for x in (queries, keys))
        chunk = config.windows[layer]
        attention_output, context = context.attend(
            layer, queries, keys, values, scale=config.query_scale, window=chunk, chunk=chunk
        )
        return self.o_proj(attention_output), context


class SharedExpertFeedForward(nnx.Module):
    """A shared expert, and routed experts. The router selects the top-k logits, and their sigmoids
    scale the inputs of the selected experts."""

    def __init__(self, config: Llama4Config, *, rngs: nnx.Rngs):
        self.choices = config.num_experts_per_tok
        hidden, dtype = config.hidden_size, config.dtype
        self.router = Linear(hidden, config.num_experts, bias=False, dtype=dtype, rngs=rngs)
        self.experts = Experts(config, scales_inputs=True, rngs=rngs)
        self.shared_expert = FeedForward(
            hidden, config.moe_intermediate_size, activation=config.hidden_act, bias=False,
            dtype=dtype, rngs=rngs,
        )  # fmt: skip

    def __call__(self, x: Hidden) -> Hidden:
        rows = x.reshape(-1, x.shape[-1])
        logits, chosen = lax.top_k(self.router(rows), self.choices)
        parts = jax.nn.sigmoid(logits.astype(jnp.float32))
        return self.shared_expert(x) + self.experts(rows, chosen, parts).reshape(x.shape)


class Llama4Block(decoder.Block):
    """One layer. The layers in ``dense_layers`` have a feed-forward module without experts."""

    attention: ClassVar = Llama4Attention

    def make_feed_forward(
        self, config: DecoderConfig, layer: int, rngs: nnx.Rngs
    ) -> decoder.FeedForwardModule:
        assert isinstance(config, Llama4Config)
        if layer in config.dense_layers:
            return super().make_feed_forward(config, layer, rngs)
        return SharedExpertFeedForward(config, rngs=rngs)


class Llama4(decoder.Decoder):
    """The text part of Llama 4 with its language-model head."""

    block: ClassVar = Llama4Block
