"""Shape aliases: the axes' names, as they stand in public signatures.

``batch`` rows, ``heads`` query heads, ``kv_heads`` key-value heads, ``new`` tokens of one call,
``slots`` places for tokens in a cache, ``head_dim`` channels a head. What users give may be numpy.
"""

import numpy as np
from jaxtyping import Array as Array
from jaxtyping import Bool, Float, Int, Integer

Queries = Float[Array | np.ndarray, "batch heads new head_dim"]
AttentionOutput = Float[Array, "batch heads new head_dim"]
KeysValues = Float[Array | np.ndarray, "batch kv_heads new head_dim"]
CachedKeysValues = Float[Array, "batch kv_heads slots head_dim"]
Tokens = Integer[Array | np.ndarray, "batch new"]
Counts = Int[Array | np.ndarray, " batch"]
PerRow = Int[Array, " batch"]
PerRowAndLayer = Int[Array, "batch layers"]
Positions = Int[Array, "batch new"]
Scalar = Int[Array, ""]
LayerNumber = int | Integer[Array, ""] | tuple[int, int | Integer[Array, ""]]
"""Of a layer of a model; of a stacked cache it may be traced, or be that of a stack, and of one of
its layers."""
Cursors = Int[Array, "batch *_"] | Int[Array, ""]
"""``PerRow``; a kernel has one row's, a number or with an axis more."""
Slots = Int[Array, "*_"]
PositionPerSlot = Int[Array, "batch *_"]
"""A position for every row and slot; for every slot, of one row."""
PageColumns = Int[Array, "batch pages"]
"""Of a table of pages, some of each row's."""
SlotPositions = Int[Array, "batch slots"]
RowMask = Bool[Array, " batch"]
SlotMask = Bool[Array, "batch slots"]
Visible = Bool[Array, "batch new slots"]
