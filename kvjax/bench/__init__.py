"""Decode and prefill, timed on the device at hand; ``kvjax.bench.measure`` gives the figures."""

from kvjax.bench.bandwidth import (
    Bandwidth,
    cpu_bandwidth,
    jax_bandwidth,
    measure_bandwidth,
    peak_memory,
)
from kvjax.bench.measuring import Bench, Cell, Split, measure
from kvjax.memory.sizes import weight_bytes_read

__all__ = [
    "Bandwidth", "Bench", "Cell", "Split", "cpu_bandwidth", "jax_bandwidth", "measure",
    "measure_bandwidth", "peak_memory", "weight_bytes_read",
]  # fmt: skip
