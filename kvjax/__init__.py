"""kvjax: the KV cache for JAX.

A cache is an immutable pytree of preallocated arrays ``(batch, kv_heads, max_len, head_dim)``.
Every operation is a pure function, and a decode step is an ordinary function for ``jit``, ``scan``,
``vmap``, differentiation and donation.
"""

from kvjax import bench, codecs, layouts, memory
from kvjax.adapters.function_model import language_model
from kvjax.attention.attend import attend, self_attend
from kvjax.attention.step import Step, step
from kvjax.cache.appending import advance, append
from kvjax.cache.checks import check, clear_status
from kvjax.cache.creation import init_cache
from kvjax.cache.reading import read
from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.chats.chat import Chat
from kvjax.chats.rendering import Turn
from kvjax.core.rotary import RotaryTable, apply_rotary, rotary_table
from kvjax.core.validation import (
    ArgumentError,
    CacheMemoryError,
    CacheOverflowError,
    CheckpointError,
    KvjaxError,
    NonFiniteError,
)
from kvjax.engine.engine import Engine
from kvjax.engine.service import Service
from kvjax.generation.aot.compiling import Compiled, compile
from kvjax.generation.batches import Batch, generate_batches
from kvjax.generation.drafts.draft_model import DraftModel, PromptLookup
from kvjax.generation.generator import generate, prefill, stream
from kvjax.generation.guides.grammars import Guides
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.results import GenerationResult
from kvjax.generation.scoring import Scored, score
from kvjax.memory.planning import plan
from kvjax.operations.capacity import grow, make_room
from kvjax.operations.concatenation import concatenate
from kvjax.operations.conversion import convert
from kvjax.operations.migration import migrate
from kvjax.operations.rows import fork, repeat, reset, rewind, rewindable, select
from kvjax.operations.saving import SavedCache, load_cache, save_cache
from kvjax.operations.stacks import stack, unstack
from kvjax.placement.device import Device, Host
from kvjax.placement.mesh import make_mesh
from kvjax.policies.cache_policy import CachePolicy, Hybrid
from kvjax.policies.presets import Auto, Edges, policy, transformers_policy
from kvjax.prefixes.tree import PrefixTree
from kvjax.quality.evaluation import evaluate
from kvjax.rollouts.program import rollout
from kvjax.rollouts.results import Rollout

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Auto",
    "Batch",
    "CacheMemoryError",
    "CacheOverflowError",
    "CachePolicy",
    "Chat",
    "CheckpointError",
    "Compiled",
    "Device",
    "DraftModel",
    "Edges",
    "Engine",
    "GenerationResult",
    "Guides",
    "Host",
    "Hybrid",
    "KVCache",
    "KvjaxError",
    "LanguageModel",
    "NonFiniteError",
    "PrefixTree",
    "PromptLookup",
    "Rollout",
    "RotaryTable",
    "SavedCache",
    "Scored",
    "Service",
    "Step",
    "Turn",
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
    "transformers_policy",
    "unstack",
]
