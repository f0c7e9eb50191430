"""kvjax: the KV cache for JAX.

A cache is an immutable pytree of preallocated arrays, ``(batch, kv_heads, max_len, head_dim)``;
every operation is a pure function, and a decode step an ordinary one to ``jit``, ``scan``,
``vmap``, differentiate and donate.
"""

from kvjax import bench
from kvjax.adapters.any_model import language_model
from kvjax.attention.attending import attend
from kvjax.attention.cursor import Step, step
from kvjax.attention.uncached import self_attend
from kvjax.cache.appending import advance, append
from kvjax.cache.creation import init_cache
from kvjax.cache.reading import read
from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.cache.status import check, clear_status
from kvjax.chats.chat import Chat
from kvjax.chats.turns import ChatStats, Turn
from kvjax.codecs import (
    Centred,
    Float8,
    HalfQuadratic,
    Int1,
    Int2,
    Int3,
    Int4,
    Int8,
    Integer,
    Raw,
    Rotated,
    Unrotated,
)
from kvjax.codecs.quantized import Quantized, dequantize_kv, quantize_kv
from kvjax.core.errors import (
    CacheMemoryError,
    CacheOverflowError,
    CheckpointError,
    KvjaxError,
    NonFiniteError,
)
from kvjax.core.rotary import RotaryTable, apply_rotary, rotary_table
from kvjax.engine.engine import Engine
from kvjax.engine.handle import Handle
from kvjax.engine.service import Service
from kvjax.engine.stats import EngineStats
from kvjax.generation.ahead import Compiled, compile
from kvjax.generation.batches import Batch, generate_batches
from kvjax.generation.drafts.asked import DraftModel, PromptLookup
from kvjax.generation.generator import generate, stream
from kvjax.generation.guides.grammars import Guides
from kvjax.generation.loaded import LanguageModel
from kvjax.generation.prefilling import prefill
from kvjax.generation.results import GenerationResult
from kvjax.generation.scoring import Scored, score
from kvjax.layouts import Dense, Growing, Paged, Ring
from kvjax.memory.devices import DevicePlan, plan_on
from kvjax.memory.fitting import what_fits
from kvjax.memory.limits import InferenceLimits
from kvjax.memory.pages import PageMap, page_map
from kvjax.memory.planning import Plan, plan
from kvjax.memory.shapes import ModelShape
from kvjax.memory.sizes import cache_nbytes, memory_report
from kvjax.operations.concatenation import concatenate
from kvjax.operations.conversion import convert
from kvjax.operations.growth import grow
from kvjax.operations.loading import SavedCache, load_cache
from kvjax.operations.migration import migrate
from kvjax.operations.rewinding import rewind, rewindable
from kvjax.operations.room import make_room
from kvjax.operations.rows import fork, repeat, reset, select
from kvjax.operations.saving import save_cache
from kvjax.operations.stacks import stack, unstack
from kvjax.paging.allocator import PageAllocator
from kvjax.placement.device import Device
from kvjax.placement.host import Host
from kvjax.placement.mesh import make_mesh
from kvjax.policies.cache_policy import CachePolicy, Hybrid
from kvjax.policies.presets import Auto, Edges, policy, quantized_codec
from kvjax.policies.transformers import transformers_policy
from kvjax.prefixes.stats import PrefixStats
from kvjax.prefixes.tree import PrefixTree
from kvjax.quality.evaluation import evaluate
from kvjax.rollouts.results import Rollout
from kvjax.rollouts.rolling import rollout

__version__ = "0.1.0"

__all__ = [
    "Auto", "Batch", "CacheMemoryError", "CacheOverflowError", "CachePolicy", "Centred", "Chat",
    "ChatStats", "CheckpointError", "Compiled", "Dense", "Device", "DevicePlan", "DraftModel",
    "Edges", "Engine", "EngineStats", "Float8", "GenerationResult", "Growing", "Guides",
    "HalfQuadratic", "Handle", "Host", "Hybrid", "InferenceLimits", "Int1", "Int2", "Int3", "Int4",
    "Int8", "Integer", "KVCache", "KvjaxError", "LanguageModel", "ModelShape", "NonFiniteError",
    "PageAllocator", "PageMap", "Paged", "Plan", "PrefixStats", "PrefixTree", "PromptLookup",
    "Quantized", "Raw", "Ring", "Rollout", "RotaryTable", "Rotated", "SavedCache", "Scored",
    "Service", "Step", "Turn", "Unrotated", "advance", "append", "apply_rotary", "attend", "bench",
    "cache_nbytes", "check", "clear_status", "compile", "concatenate", "convert", "dequantize_kv",
    "evaluate", "fork", "generate", "generate_batches", "grow", "init_cache", "language_model",
    "load_cache", "make_mesh", "make_room", "memory_report", "migrate", "nbytes", "page_map",
    "plan", "plan_on", "policy", "prefill", "quantize_kv", "quantized_codec", "read", "repeat",
    "reset", "rewind", "rewindable", "rollout", "rotary_table", "save_cache", "score", "select",
    "self_attend", "stack", "step", "stream", "transformers_policy", "unstack", "what_fits",
]  # fmt: skip
