"""How the Mosaic GPU kernel divides a call: programs, pieces of a text, shared memory."""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu

from kvjax.attention.kernels.mosaic_gpu_stores import Form, form_of
from kvjax.cache.sections import Section
from kvjax.core.target import Target, current_target

plgpu: Any = mosaic_gpu  # what of it is used here came with JAX 0.11 and 0.12
TOKENS = 64
"""Of a text that is stored token by token, what is fetched together, at most."""
FETCHED = 32
"""Rows of numbers that are fetched together, at least."""
MOST = 64
"""Rows of queries of a program, at most, of up to 128 channels; of more, half as many."""
PROGRAMS = 256
"""Programs of a call, about: some for each of a GPU's multiprocessors."""
FEWEST = 4
"""Pieces that a program walks, at least, where a row's text is shared."""
AHEAD = 4
"""Pieces in shared memory, at most; two at least."""
ROOM = 96
"""KiB of shared memory that a program takes if it can, so that two programs fit on a
multiprocessor."""
GRAIN, LANES = 16, 8
"""The size of a matrix product: rows of queries, or numbers that are summed (``GRAIN``), and
tokens or channels (``LANES``)."""
KIB = 1024
WHOLE = 128
"""Numbers that are written together."""


@dataclass(frozen=True)
class Plan:
    """How a call is divided.

    ``warps``: of four, those that divide rows of queries; the others divide tokens. ``piece``:
    units that are fetched together, and ``steps``: pieces in shared memory. ``run``: tokens that
    are multiplied together. ``product`` and ``queries``: dtypes of factors and of queries.
    ``swizzle``: of numbers in shared memory, bytes.
    """

    forms: tuple[Form, Form]
    unit: int
    head_dim: int
    warps: int
    piece: int
    steps: int
    queries: Any
    swizzle: int

    @property
    def product(self) -> Any:
        return jnp.dtype("float16" if self.queries == jnp.float16 else "bfloat16")

    @property
    def rows(self) -> int:
        """Rows of queries of a program."""
        return GRAIN * self.warps

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Of a piece: which unit of it, and which run of the unit's tokens."""
        parts = max(form.parts for form in self.forms)
        if self.unit == 1:
            return [(0, 0)]
        return [(unit, part) for unit in range(self.piece) for part in range(parts)]

    @property
    def run(self) -> int:
        if self.unit == 1:
            return self.piece
        return self.unit // max(form.parts for form in self.forms)

    def rows_of(self, which: int) -> int:
        """Rows of numbers of a piece of keys (0) or values (1)."""
        return self.piece * self.forms[which].rows

    def planes(self, which: int) -> int:
        """Made in shared memory; 0 where numbers are multiplied as they lie."""
        return self.forms[which].planes(self.queries, self.product)

    def where(self, which: int, run: tuple[int, int]) -> tuple[int, int]:
        """Of a run: its plane, and its first row there."""
        unit, part = run
        form = self.forms[which]
        each = max(x.parts for x in self.forms) // form.parts
        return part // each, unit * form.rows + part % each * self.run

    def layout(self, kind: Any) -> Any:
        """Of the first factor of a product, the second one or the sum."""
        return kind(self.product, m_warps=self.warps)

    @property
    def first(self) -> Any:
        return self.layout(plgpu.Layout.MMA_LHS)

    @property
    def second(self) -> Any:
        return self.layout(plgpu.Layout.MMA_RHS)

    @property
    def sums(self) -> Any:
        return self.layout(plgpu.Layout.MMA_ACC)

    def scratch(self, written: int, fenced: bool) -> dict[str, Any]:
        """Shared memory, by name."""
        found: dict[str, Any] = {}
        tiles = (
            plgpu.TilingTransform((LANES, self.swizzle // 2)),
            plgpu.SwizzleTransform(self.swizzle),
        )
        for which, form in enumerate(self.forms):
            shape = self.steps, self.rows_of(which), self.head_dim
            direct: Any = {} if self.planes(which) else {"transforms": tiles}
            found[f"fetched_{which}"] = plgpu.SMEM(shape, form.dtype, **direct)
            for name in form.of_tokens:
                each = self.piece, form.groups, self.unit
                found[f"{name}_{which}"] = plgpu.SMEM(each, jnp.float32)
        # Unpacked keys, which unpacked values overwrite; planes follow each other.
        made = max(self.planes(which) * self.rows_of(which) for which in (0, 1))
        if made:
            found["made"] = plgpu.SMEM((made, self.head_dim), self.product, transforms=tiles)
        wide = self.queries == jnp.float32
        weights = len(self.runs), self.forms[1].groups, self.rows, self.run
        found["weights"] = plgpu.SMEM(weights, jnp.float32 if wide else self.product)
        if written < self.rows:
            found["mixed"] = plgpu.SMEM((self.rows, self.head_dim), jnp.float32)
        if fenced:
            found["arrived"] = plgpu.Barrier(num_arrivals=2, num_barriers=self.steps)
        return found

    def written(self, rows: int) -> int:
        """Rows of mixtures that a program writes, of ``rows`` of queries: rounded up to whole
        writes."""
        some = (n for n in range(min(rows, self.rows), self.rows) if n * self.head_dim % WHOLE == 0)
        return next(some, self.rows)

    def bytes(self, rows: int) -> int:
        """Shared memory for ``rows`` of queries: each array rounded up, and sums across warps."""
        total = 2 * KIB
        for each in self.scratch(self.written(rows), False).values():
            total += -(-each.dtype.itemsize * math.prod(each.shape) // KIB) * KIB
        return total


def plan_of(section: Section, head_dim: int, rows: int, dtype: Any) -> Plan | None:
    """How a call over a section is divided; None where it can't be."""
    forms = [form_of(codec, section.unit, head_dim) for codec in section.codecs]
    if None in forms or dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return None
    units = page = jax.tree.leaves(section.keys)[0].shape[2]
    if section.unit == 1 and units % LANES:
        return None
    if section.pages is None or section.pages.shape[1] == 1:
        page = 1 << 30  # a row's units are contiguous
    target = current_target()
    # Where it is interpreted, an H100's.
    shared = (target if target.capability else Target("gpu", (9, 0))).shared_memory
    settings: Any = tuple(forms), section.unit, units, page & -page
    return _planned(*settings, head_dim, rows, jnp.dtype(dtype), shared // KIB)


@functools.lru_cache(maxsize=256)
def _planned(
    forms: tuple[Form, Form], unit: int, units: int, page: int, head_dim: int, rows: int,
    dtype: Any, shared: int,
) -> Plan | None:  # fmt: skip
    """``plan_of`` for a store of ``units``, of which ``page`` are contiguous."""
    wanted = min(rows, MOST if head_dim <= 128 else MOST // 2)
    needed = -(-FETCHED // min(form.rows for form in forms))
    sizes = (TOKENS, TOKENS // 2, TOKENS // 4) if unit == 1 else (needed,)
    widths = [head_dim // form.groups for form in forms]
    swizzle = next((s for s in (128, 64, 32) if all(n % (s // 2) == 0 for n in widths)), None)
    if swizzle is None:
        return None
    for most, size, steps, warps in itertools.product(
        (ROOM, shared), sizes, range(AHEAD, 1, -1), (1, 2, 4)
    ):
        piece = min(1 << size.bit_length() - 1, 1 << units.bit_length() - 1, page)
        if GRAIN * warps < wanted and warps < 4:
            continue
        plan = Plan(forms, unit, head_dim, warps, piece, steps, dtype, swizzle)
        across = LANES * 4 // warps  # tokens, or channels, that all warps take together
        whole = all(n % across == n % GRAIN == 0 for n in (plan.run, *widths))
        along = all(form.along % plan.run == 0 for form in forms)
        if whole and along and plan.bytes(rows) <= min(most, shared) * KIB:
            return plan
    return None


def splits_of(programs: int, pieces: int) -> int:
    """Programs that share a row's text: enough to occupy a GPU, with at least ``FEWEST`` pieces
    each."""
    wanted = max(PROGRAMS // programs, 1)
    return min(1 << wanted.bit_length() - 1, 1 << max(pieces // FEWEST, 1).bit_length() - 1)
