"""Decode and prefill times on the current device; ``kvjax.bench.measure`` measures them."""

from kvjax.bench.measuring import Bench, Cell, Split, measure
from kvjax.bench.timing import (
    Bandwidth,
    cpu_bandwidth,
    jax_bandwidth,
    measure_bandwidth,
    peak_memory,
)
from kvjax.memory.sizes import weight_bytes_read

__all__ = [
    "Bandwidth",
    "Bench",
    "Cell",
    "Split",
    "cpu_bandwidth",
    "jax_bandwidth",
    "measure",
    "measure_bandwidth",
    "peak_memory",
    "weight_bytes_read",
]
