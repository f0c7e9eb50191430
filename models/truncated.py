"""A model of another one's first layers."""

from dataclasses import replace
from typing import Any

from kvjax.core.validation import as_int
from kvjax.generation.loaded_model import LanguageModel

from .architecture import Architecture
from .config_families import MoeConfig, SharingConfig, T5Config

_OF_LAYERS = ("windows", "rope_layers")
"""Fields of configurations that have an entry a layer."""


def first_layers(lm: LanguageModel, layers: int) -> LanguageModel:
    """The model that is left when a model of ``kvjax.models`` ends behind its first layers, with
    its own last norm and head: a draft that needs no weights of its own, as the arrays are the
    same.

    Source: Elhoushi et al., LayerSkip, arXiv:2404.16710; Zhang et al., arXiv:2309.08168.

    Args:
      lm: the model.
      layers: how many, fewer than it has.

    Raises:
      ValueError: if it has not so many; if its later layers read what earlier ones keep, or it has
        an encoder; if it is none of ``kvjax.models``.
    """
    architecture = lm.architecture
    if not isinstance(architecture, Architecture):
        raise ValueError("first_layers is of models of kvjax.models: of one of your own, make it")
    config: Any = architecture.config
    if isinstance(config, SharingConfig | T5Config):
        raise ValueError(
            f"a {config.model_type} has no model of its first layers: its layers go by others"
        )
    count = as_int("layers", layers, 1)
    if count >= config.num_hidden_layers:
        raise ValueError(
            f"layers is {count}, and the model has {config.num_hidden_layers}: give fewer"
        )
    cut: dict[str, Any] = {
        name: getattr(config, name)[:count] for name in _OF_LAYERS if hasattr(config, name)
    }
    if isinstance(config, MoeConfig):
        cut["dense_layers"] = tuple(layer for layer in config.dense_layers if layer < count)
    shorter = Architecture(replace(config, num_hidden_layers=count, **cut))
    params = _like(shorter.abstract_params(), lm.params)
    return replace(lm, config=shorter.config, architecture=shorter, params=params)


def _like(names: Any, params: Any) -> Any:
    """The parameters of these names."""
    if not isinstance(names, dict):
        return params
    return {name: _like(node, params[name]) for name, node in names.items()}
