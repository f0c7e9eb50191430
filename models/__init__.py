"""Models: configurations, architectures, weights and tokenizers of checkpoints.

``load()`` gives the embedded model; ``load(folder)`` and ``load("owner/name")`` any other of the
families llama, mistral, qwen2, qwen3, gemma2, gemma3_text and gpt2.
"""

from kvjax.generation.defaults import GenerationDefaults
from kvjax.generation.loaded import LanguageModel
from kvjax.generation.token_text import TextStream

from .architecture import Architecture
from .config import GemmaConfig, GPT2Config, LlamaConfig, RopeConfig
from .config_json import read_config
from .loading import load
from .rope import model_rotary
from .text import Tokenizer

__all__ = [
    "Architecture",
    "GPT2Config",
    "GemmaConfig",
    "GenerationDefaults",
    "LanguageModel",
    "LlamaConfig",
    "RopeConfig",
    "TextStream",
    "Tokenizer",
    "load",
    "model_rotary",
    "read_config",
]
