"""Decoders described by their sizes, to plan for models that kvjax can't run."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from kvjax.attention.attend import attend
from kvjax.cache.appending import advance, append
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import contract_last
from kvjax.core.typing import Array, Tokens
from kvjax.core.validation import as_int, as_optional_int
from kvjax.policies.model_config import layer_windows

_DTYPES = ("bfloat16", "float16", "float32")
_UNGATED = (
    "gpt2", "gpt_neox", "gpt_neo", "gptj", "gpt_bigcode", "codegen", "opt", "bloom", "falcon",
    "mpt", "phi", "starcoder2", "xglm",
)  # fmt: skip
"""Families with two feed-forward matrices, if the config does not name an activation."""
_UNSUPPORTED = ("num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, to plan for models that kvjax can't run.

    Attributes:
      gated: whether the feed-forward part has three matrices instead of two.
      tied: whether the output head is the token embedding.
      learned_positions: number of rows of a learned position embedding, or 0.
      context: training length in tokens, if known.
      windows: the window of each layer, or None for full attention. The whole attribute is None if
        no layer has a window.

    Example:
      ```python
      shape = kvjax.memory.ModelShape(32, 4096, 14336, 32, 8, 128, 128256)  # Llama 3 8B
      plan = kvjax.plan(shape, kvjax.policy(bits=4), max_len=8192)
      print(plan.weights, plan.cache)
      ```
    """

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    dtype: str = "bfloat16"
    gated: bool = True
    tied: bool = False
    learned_positions: int = 0
    context: int | None = None
    windows: tuple[int | None, ...] | None = None

    apply = None  # a shape has no weights

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> "ModelShape":
        """Read the sizes from a ``config.json`` of Transformers, of any family with the usual
        names.

        If the config has a ``text_config``, this part is used.

        Raises:
          ValueError: if a name is missing or has a wrong value, or if the usual names do not
            determine the bytes (mixtures of experts, latent attention, layers of different shapes).
        """
        if isinstance(text := config.get("text_config"), Mapping):
            config = {**config, **text}
        for name in _UNSUPPORTED:
            if config.get(name) not in (None, 0, 1):
                raise ValueError(
                    f"the config has {name}: the shape alone does not determine its bytes"
                )

        def get(*names: str, default: int | None = None) -> int:
            for name in names:
                if config.get(name) is not None:
                    return as_int(name, config[name], 1)
            if default is None:
                raise ValueError(f"the config has no {' or '.join(names)}")
            return default

        hidden, heads = get("hidden_size", "n_embd"), get("num_attention_heads", "n_head")
        family = str(config.get("model_type", ""))
        names = ("hidden_activation", "hidden_act", "activation_function")
        usual = "gelu" if family in _UNGATED else "silu"
        activation = next((str(config[name]) for name in names if config.get(name)), usual)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        dtype = dtype.removeprefix("torch.")
        # float64 weights are loaded as float32.
        dtype = {"auto": "bfloat16", "float64": "float32"}.get(dtype, dtype)
        if dtype not in _DTYPES:
            raise ValueError(
                f"the config's dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}"
            )
        # A missing value means the family's default.
        tied = config.get("tie_word_embeddings", family.startswith(("gpt2", "gemma")))
        layers = get("num_hidden_layers", "n_layer")
        windows = layer_windows(_window_settings(config, family, layers))
        return cls(
            num_hidden_layers=layers,
            hidden_size=hidden,
            intermediate_size=get("intermediate_size", "n_inner", default=4 * hidden),
            num_attention_heads=heads,
            num_key_value_heads=get("num_key_value_heads", default=heads),
            head_dim=get("head_dim", default=max(hidden // heads, 1)),
            vocab_size=get("vocab_size"),
            dtype=dtype,
            gated=activation in ("silu", "swiglu") or family.startswith("gemma"),
            tied=bool(tied),
            learned_positions=get("n_positions", default=0),
            context=get("max_position_embeddings", "n_positions", default=0) or None,
            windows=windows if any(windows) else None,
        )

    @property
    def config(self) -> "ModelShape":
        """The shape itself, which has the attributes of a config."""
        return self

    @property
    def position_limit(self) -> int | None:
        """Number of learned positions, or None."""
        return self.learned_positions or None

    def param_shardings(self, mesh: object) -> NoReturn:
        """Raise ``ValueError``, because a shape does not determine how weights are sharded."""
        raise ValueError("plans for a mesh need a model that kvjax can run, not only a ModelShape")

    def abstract_params(self) -> dict[str, PyTree]:
        """Return the shapes of the matrices. Biases and norms, which are less than 0.1 % of the
        parameters, are left out."""

        def matrix(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

        hidden, queries = self.hidden_size, self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        layer = {
            "qkv": matrix(queries + 2 * keys, hidden),
            "out": matrix(hidden, queries),
            "up": matrix(self.intermediate_size, hidden),
            "down": matrix(hidden, self.intermediate_size),
        }
        if self.gated:
            layer["gate"] = matrix(self.intermediate_size, hidden)
        params: dict[str, PyTree] = {"embed_tokens": matrix(self.vocab_size, hidden)}
        if self.learned_positions:
            params["wpe"] = matrix(self.learned_positions, hidden)
        if not self.tied:
            params["lm_head"] = matrix(self.vocab_size, hidden)
        return params | {f"layer_{number}": layer for number in range(self.num_hidden_layers)}

    def forward(
        self, params: dict[str, PyTree], tokens: Tokens, cache: KVCache, *, last_only: bool = True
    ) -> tuple[Array, KVCache]:
        """Run a decoder of this shape: its matrix products, and attention over the cache.

        This method is used to compile programs for planning. Biases, positions and the weights of
        norms are left out, because they are less than 0.1 % of the cost.

        Args:
          params: parameters with the shapes of ``abstract_params``.
          tokens: int32[batch, new].
          cache: the cache.
          last_only: whether to compute only the logits of the last token, as for prompts.
        """

        def norm(x: Array) -> Array:
            wide = x.astype(jnp.float32)
            size = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
            return (wide * jax.lax.rsqrt(size + 1e-6)).astype(x.dtype)

        def project(x: Array, weight: Array) -> Array:
            return contract_last(x, weight).astype(x.dtype)

        def split(x: Array, heads: int) -> Array:
            return x.reshape(*x.shape[:2], heads, self.head_dim).swapaxes(1, 2)

        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        ends = heads * self.head_dim, (heads + kv_heads) * self.head_dim
        x = params["embed_tokens"][tokens]
        windows = self.windows or (None,) * self.num_hidden_layers
        for number, window in enumerate(windows):
            layer = params[f"layer_{number}"]
            queries, keys, values = jnp.split(project(norm(x), layer["qkv"]), ends, axis=-1)
            cache = append(cache, number, split(keys, kv_heads), split(values, kv_heads))
            output = attend(split(queries, heads), cache, number, window=window).swapaxes(1, 2)
            x = x + project(output.reshape(*x.shape[:2], -1), layer["out"])
            inner = jax.nn.silu(project(norm(x), layer["gate" if self.gated else "up"]))
            if self.gated:
                inner = inner * project(norm(x), layer["up"])
            x = x + project(inner, layer["down"])
        x = norm(x[:, -1:] if last_only else x)
        head = params.get("lm_head", params["embed_tokens"])
        return contract_last(x, head), advance(cache, tokens.shape[1])


def _window_settings(config: Mapping[str, object], family: str, layers: int) -> SimpleNamespace:
    """Return the settings of a ``config.json`` that determine windows, with the family's defaults.

    In Gemma 2, every second layer has a window.
    """
    names = [
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "attention_chunk_size",
        "max_window_layers",
    ]
    settings = {name: config.get(name) for name in names if name in config}
    for name in ("sliding_window", "attention_chunk_size", "max_window_layers"):
        as_optional_int(name, settings.get(name), 0)
    every = config.get("sliding_window_pattern", 2 if family == "gemma2" else None)
    every = as_optional_int("sliding_window_pattern", every, 1)
    return SimpleNamespace(num_hidden_layers=layers, sliding_window_pattern=every, **settings)


def _every_sixth(layers: int, window: int) -> tuple[int | None, ...]:
    """Return windows for all layers except every sixth."""
    return tuple(None if (layer + 1) % 6 == 0 else window for layer in range(layers))


SHAPES = {
    "gpt2": ModelShape(
        12, 768, 3072, 12, 12, 64, 50257,
        gated=False, tied=True, learned_positions=1024, context=1024,
    ),
    "llama-135m": ModelShape(30, 576, 1536, 9, 3, 64, 49152, tied=True, context=8192),
    "llama-3-8b": ModelShape(32, 4096, 14336, 32, 8, 128, 128256, context=8192),
    "llama-3.1-8b": ModelShape(32, 4096, 14336, 32, 8, 128, 128256, context=131072),
    "llama-3.2-1b": ModelShape(16, 2048, 8192, 32, 8, 64, 128256, tied=True, context=131072),
    "llama-3.2-3b": ModelShape(28, 3072, 8192, 24, 8, 128, 128256, tied=True, context=131072),
    "llama-3.1-70b": ModelShape(80, 8192, 28672, 64, 8, 128, 128256, context=131072),
    "qwen3-0.6b": ModelShape(28, 1024, 3072, 16, 8, 128, 151936, tied=True, context=40960),
    "qwen3-8b": ModelShape(36, 4096, 12288, 32, 8, 128, 151936, context=40960),
    "gemma-3-1b": ModelShape(
        26, 1152, 6912, 4, 1, 256, 262144,
        tied=True, context=32768, windows=_every_sixth(26, 512),
    ),
    "gemma-3-4b": ModelShape(
        34, 2560, 10240, 8, 4, 256, 262208,
        tied=True, context=131072, windows=_every_sixth(34, 1024),
    ),
    "mistral-7b": ModelShape(32, 4096, 14336, 32, 8, 128, 32768, context=32768),
    "llama-65b": ModelShape(80, 8192, 22016, 64, 64, 128, 32000, context=2048),
    "gpt-neox-20b": ModelShape(44, 6144, 24576, 64, 64, 96, 50432, gated=False, context=2048),
    "gpt-3-175b": ModelShape(
        96, 12288, 49152, 96, 96, 128, 50257,
        gated=False, tied=True, learned_positions=2048, context=2048,
    ),
}  # fmt: skip
"""Well-known models in 16 bits.

Sources: Grattafiori et al., arXiv:2407.21783; Qwen team, arXiv:2505.09388; Gemma team,
arXiv:2503.19786; Jiang et al., arXiv:2310.06825; Radford et al., 2019; Touvron et al.,
arXiv:2302.13971; Black et al., arXiv:2204.06745; Brown et al., arXiv:2005.14165. The README's
measurements use llama-135m, the shape of SmolLM2 (Allal et al., arXiv:2502.02737)."""
