"""How much the kernel for TPUs reads and multiplies together: what fits in the fast memory."""

import jax

from kvjax.attention.kernels.common import Reading
from kvjax.placement.order import LANES

ROWS = 512
"""Rows of queries that walk a text together, at most."""
PLANE = 2**21
"""Bytes of a run's numbers in float32, at most: some such arrays are in the fast memory at once."""
GRAIN = 16
"""Rows of a tile of 16-bit numbers."""
MIXTURES = 4
"""Arrays of rows of queries that they are counted with. Those that a softmax goes on from are not
counted: they have room beside them."""
LONGEST = 1024
"""Tokens of a run, at most."""


def sizes_of(reading: Reading, capacity: int) -> tuple[int, int, int]:
    """Heads of keys, tokens of so many, and rows of queries that are looked at together."""
    _, kv_heads, rows, head_dim = reading.queries.shape
    together = min(-(-rows // GRAIN) * GRAIN, ROWS)
    # As many numbers of a head's tokens, and scores, as fit with those of its fellows.
    lanes = reading.sides * head_dim
    # Those of all runs are there before the first is a weight.
    width = max(lanes, together * max(*reading.groups, reading.parts // 2)) * 4
    section, least = reading.section, LANES
    if section.unit > 1:
        for order in jax.tree.leaves(section.orders):
            units = -(-order.multiple // order.step)
            least = max(least, units * section.unit // reading.parts)
    # And mixtures, of which there are some: what is summed, and the result, twice.
    one = max(least * width, MIXTURES * together * lanes * 4)
    fitting = (n for n in range(2, kv_heads + 1) if n * one <= PLANE)
    heads = max((n for n in fitting if kv_heads % n == 0), default=1)
    each = max(PLANE // (heads * width), least)
    each = min(1 << each.bit_length() - 1, max(LONGEST, least))
    # Of sinks, which stand in one array with a ring, no more is read than there is.
    grain = max(GRAIN, *(order.multiple for order in jax.tree.leaves(section.orders)))
    needed = -(-(section.first + section.size) * section.unit // grain) * grain
    tile = min(each * reading.parts, capacity, needed if section.unit == 1 else capacity)
    return heads, tile, together
