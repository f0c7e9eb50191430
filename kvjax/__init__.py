"""kvjax: the KV cache for JAX.

A cache is an immutable pytree of preallocated arrays ``(batch, kv_heads, max_len, head_dim)``.
Every operation is a pure function, and a decode step is an ordinary function for ``jit``, ``scan``,
``vmap``, differentiation and donation.
"""

from kvjax import attention as attention
from kvjax import bench, codecs, layouts, memory
from kvjax import chats as chats
from kvjax import engine as engine
from kvjax import generation as generation
from kvjax import operations as operations
from kvjax import paging as paging
from kvjax import policies as policies
from kvjax import prefixes as prefixes
from kvjax import rollouts as rollouts
from kvjax.adapters.function_model import language_model
from kvjax.attention.attend import attend, self_attend
from kvjax.attention.step import step
from kvjax.cache.appending import advance, append
from kvjax.cache.checks import check, clear_status
from kvjax.cache.creation import init_cache
from kvjax.cache.reading import read
from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.chats.chat import Chat
from kvjax.core.rotary import apply_rotary, rotary_table
from kvjax.core.validation import (
    ArgumentError,
    CacheMemoryError,
    CacheOverflowError,
    CheckpointError,
    KvjaxError,
    NonFiniteError,
)
from kvjax.engine.engine import Engine
from kvjax.generation.aot.compiling import compile
from kvjax.generation.batches import generate_batches
from kvjax.generation.drafts.draft_model import DraftModel, PromptLookup
from kvjax.generation.generator import generate, prefill, stream
from kvjax.generation.guides.grammars import Guides
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.results import GenerationResult
from kvjax.generation.scoring import score
from kvjax.memory.planning import plan
from kvjax.operations.capacity import grow, make_room
from kvjax.operations.concatenation import concatenate
from kvjax.operations.conversion import convert
from kvjax.operations.migration import migrate
from kvjax.operations.rows import fork, repeat, reset, rewind, rewindable, select
from kvjax.operations.saving import load_cache, save_cache
from kvjax.operations.stacks import stack, unstack
from kvjax.placement.device import Device, Host
from kvjax.placement.mesh import make_mesh
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.presets import policy
from kvjax.prefixes.tree import PrefixTree
from kvjax.quality.evaluation import evaluate
from kvjax.rollouts.program import rollout

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CacheMemoryError",
    "CacheOverflowError",
    "CachePolicy",
    "Chat",
    "CheckpointError",
    "Device",
    "DraftModel",
    "Engine",
    "GenerationResult",
    "Guides",
    "Host",
    "KVCache",
    "KvjaxError",
    "LanguageModel",
    "NonFiniteError",
    "PrefixTree",
    "PromptLookup",
    "advance",
    "append",
    "apply_rotary",
    "attend",
    "bench",
    "check",
    "clear_status",
    "codecs",
    "compile",
    "concatenate",
    "convert",
    "evaluate",
    "fork",
    "generate",
    "generate_batches",
    "grow",
    "init_cache",
    "language_model",
    "layouts",
    "load_cache",
    "make_mesh",
    "make_room",
    "memory",
    "migrate",
    "nbytes",
    "plan",
    "policy",
    "prefill",
    "read",
    "repeat",
    "reset",
    "rewind",
    "rewindable",
    "rollout",
    "rotary_table",
    "save_cache",
    "score",
    "select",
    "self_attend",
    "stack",
    "step",
    "stream",
    "unstack",
]
