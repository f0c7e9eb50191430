"""What generation asks of a model: ``kvjax.models`` gives it, and so can anybody else."""

from typing import Any, Protocol

from jax.sharding import Mesh

from kvjax.cache.state import KVCache
from kvjax.core.typing import Array, Tokens
from kvjax.generation.text import Tokenizer
from kvjax.memory.weights import Loaded
from kvjax.policies.model_config import CacheShape


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
    @property
    def position_limit(self) -> int | None: ...


class Defaults(Protocol):
    """What generation asks of a checkpoint's generation defaults."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class LanguageModel(Loaded, Protocol):
    """A loaded model: see ``kvjax.models.load``."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def generation(self) -> Defaults: ...
    @property
    def architecture(self) -> Model: ...
    def on(self, mesh: Mesh) -> "LanguageModel": ...
