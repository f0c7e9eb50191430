"""kvjax: the KV cache for JAX.

A cache is an immutable pytree of preallocated arrays, ``(batch, kv_heads, max_len, head_dim)``;
every operation is a pure function, and a decode step an ordinary one to ``jit``, ``scan``,
``vmap``, differentiate and donate.
"""

from kvjax import bench
from kvjax._errors import CacheOverflowError, CheckpointError, KvjaxError, NonFiniteError
from kvjax.attention import attend, self_attend
from kvjax.batches import Batch, generate_batches
from kvjax.cache import (
    KVCache,
    LayerCache,
    advance,
    append,
    init_cache,
    nbytes,
    read,
)
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
from kvjax.compile_ahead import Compiled, compile
from kvjax.convert import convert
from kvjax.evaluate import evaluate
from kvjax.generate import GenerationResult, generate, stream
from kvjax.layouts import Dense, Growing, Ring
from kvjax.limits import InferenceLimits, what_fits
from kvjax.memory import Plan, cache_nbytes, memory_report, plan
from kvjax.mesh import make_mesh
from kvjax.migrate import make_room, migrate
from kvjax.model_shape import ModelShape
from kvjax.operations import (
    concatenate,
    fork,
    grow,
    repeat,
    reset,
    rewind,
    rewindable,
    select,
)
from kvjax.placement import Device, Host
from kvjax.policy import CachePolicy, Hybrid
from kvjax.presets import Auto, Edges, policy, quantized_codec, transformers_policy
from kvjax.quantize import Quantized, dequantize_kv, quantize_kv
from kvjax.rotary import RotaryTable, apply_rotary, rotary_table
from kvjax.status import check, clear_status

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "Batch",
    "CacheOverflowError",
    "CachePolicy",
    "Centred",
    "CheckpointError",
    "Compiled",
    "Dense",
    "Device",
    "Edges",
    "Float8",
    "GenerationResult",
    "Growing",
    "HalfQuadratic",
    "Host",
    "Hybrid",
    "InferenceLimits",
    "Int1",
    "Int2",
    "Int3",
    "Int4",
    "Int8",
    "Integer",
    "KVCache",
    "KvjaxError",
    "LayerCache",
    "ModelShape",
    "NonFiniteError",
    "Plan",
    "Quantized",
    "Raw",
    "Ring",
    "RotaryTable",
    "Rotated",
    "Unrotated",
    "advance",
    "append",
    "apply_rotary",
    "attend",
    "bench",
    "cache_nbytes",
    "check",
    "clear_status",
    "compile",
    "concatenate",
    "convert",
    "dequantize_kv",
    "evaluate",
    "fork",
    "generate",
    "generate_batches",
    "grow",
    "init_cache",
    "make_mesh",
    "make_room",
    "memory_report",
    "migrate",
    "nbytes",
    "plan",
    "policy",
    "quantize_kv",
    "quantized_codec",
    "read",
    "repeat",
    "reset",
    "rewind",
    "rewindable",
    "rotary_table",
    "select",
    "self_attend",
    "stream",
    "transformers_policy",
    "what_fits",
]
