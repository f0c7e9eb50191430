"""The module of each family, by its configuration."""

from .config import GemmaConfig, GPT2Config, LlamaConfig
from .config_families import (
    Gemma3nConfig,
    Gemma4Config,
    Llama4Config,
    MixtralConfig,
    MoeConfig,
    NeoXConfig,
    Phi3Config,
    T5Config,
)
from .decoder import Decoder
from .frame import Frame
from .gemma3n import Gemma3n
from .gemma4 import Gemma4
from .gpt2 import GPT2
from .llama4 import Llama4
from .moe import Moe
from .neox import NeoX
from .phi3 import Phi3
from .t5 import T5

FAMILIES: dict[type, type[Frame]] = {
    LlamaConfig: Decoder,
    GemmaConfig: Decoder,
    GPT2Config: GPT2,
    Gemma3nConfig: Gemma3n,
    Gemma4Config: Gemma4,
    Llama4Config: Llama4,
    MixtralConfig: Moe,
    MoeConfig: Moe,
    NeoXConfig: NeoX,
    Phi3Config: Phi3,
    T5Config: T5,
}
