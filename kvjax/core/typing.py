"""Shape aliases for signatures.

The axes are ``batch`` (rows), ``heads`` (query heads), ``kv_heads`` (key-value heads), ``new``
(tokens of one call), ``slots`` (token slots of a cache) and ``head_dim`` (channels per head).
Aliases for arguments of public functions also accept NumPy arrays.
"""

from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Array as Array
from jaxtyping import Bool, Float, Int, Integer

Json: TypeAlias = dict[str, Any]
"""A parsed JSON object. The code that reads its values checks them."""
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
"""The index of a layer of the model. In a stacked cache it may be traced, or be a pair: the index
of the stack, and the index of the layer within the stack."""
Cursors = Int[Array, "batch *_"] | Int[Array, ""]
"""One number per row, possibly with more axes. In a kernel it is the scalar of a single row."""
Slots = Int[Array, "*_"]
PositionPerSlot = Int[Array, "batch *_"]
"""The position in every slot of every row. In a kernel it has the slots of a single row."""
PageColumns = Int[Array, "batch pages"]
"""Columns of a page table, selected per row."""
SlotPositions = Int[Array, "batch slots"]
RowMask = Bool[Array, " batch"]
SlotMask = Bool[Array, "batch slots"]
Visible = Bool[Array, "batch new slots"]
