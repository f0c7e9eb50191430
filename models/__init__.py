"""Models: configurations, architectures, weights and tokenizers of checkpoints.

``load()`` loads the embedded model. ``load(folder)`` and ``load("owner/name")`` load any model of
the families that ``supported()`` lists, or the text part of a model that also reads images, audio
or video.
"""

from kvjax.generation.detokenizer import TextStream
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import GenerationDefaults

from .architecture import Architecture, first_layers
from .config import (
    Cohere2Config,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    NeoXConfig,
    Phi3Config,
    RopeConfig,
    T5Config,
)
from .config_fields import supported
from .config_gemma import Gemma3nConfig, Gemma4Config
from .config_moe import Llama4Config, MixtralConfig, MoeConfig
from .loading import load, read_config
from .rope import model_rotary
from .text import Tokenizer

__all__ = [
    "Architecture",
    "Cohere2Config",
    "GPT2Config",
    "Gemma3nConfig",
    "Gemma4Config",
    "GemmaConfig",
    "GenerationDefaults",
    "LanguageModel",
    "Llama4Config",
    "LlamaConfig",
    "MixtralConfig",
    "MoeConfig",
    "NeoXConfig",
    "Phi3Config",
    "RopeConfig",
    "T5Config",
    "TextStream",
    "Tokenizer",
    "first_layers",
    "load",
    "model_rotary",
    "read_config",
    "supported",
]
