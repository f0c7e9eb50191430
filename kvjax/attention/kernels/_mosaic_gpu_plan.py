"""How the Mosaic GPU kernel divides its work, and its operands in shared memory."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from kvjax.attention.kernels.common import DType, Ref, core_of
from kvjax.attention.kernels.mosaic_gpu_formats import (
    ScaleOffset,
    StoreFormat,
    format_of,
    scale_offset,
)
from kvjax.cache.sections import Section
from kvjax.core.target import Target, current_target
from kvjax.core.typing import Array

plgpu: Any = mosaic_gpu  # parts of it are missing before JAX 0.12
Layout = Any
"""A layout of an array in registers."""
MAX_TOKENS = 64
"""The maximum number of tokens of a tile, if the cache is stored token by token."""
MIN_ROWS = 32
"""The minimum number of rows of numbers in a tile."""
MAX_QUERIES = 64
"""The maximum number of query rows of a program if heads have up to 128 channels. For wider heads,
the maximum is half of this number."""
MAX_STAGES = 4
"""The maximum number of pipeline stages. The minimum is two."""
PREFERRED_KIB = 96
"""The preferred limit of a program's shared memory in KiB. Two such programs fit on a
multiprocessor."""
MMA_K, MMA_N = 16, 8
"""The shape of a matrix product. ``MMA_K`` is the number of query rows and of contracted numbers,
and ``MMA_N`` the number of tokens or channels."""
KIB = 1024
COPY_NUMBERS = 128
"""How many numbers one copy to global memory writes."""


@dataclass(frozen=True)
class Plan:
    """How the kernel divides a call.

    Attributes:
      formats: the storage formats of keys and values.
      unit: tokens per unit.
      head_dim: channels per head.
      warps: the number of parts into which the four warps divide the query rows. If it is less than
        four, they divide the tokens as well.
      tile: how many units are fetched together.
      stages: how many tiles the pipeline holds in shared memory.
      queries: the dtype of the queries.
      swizzle: bytes of the shared-memory swizzle.
    """

    formats: tuple[StoreFormat, StoreFormat]
    unit: int
    head_dim: int
    warps: int
    tile: int
    stages: int
    queries: DType
    swizzle: int

    @property
    def product(self) -> DType:
        """The dtype of the operands of products."""
        return jnp.dtype("float16" if self.queries == jnp.float16 else "bfloat16")

    @property
    def rows(self) -> int:
        """The number of query rows of a program."""
        return MMA_K * self.warps

    @property
    def subblocks_per_unit(self) -> int:
        return max(form.subblocks for form in self.formats)

    @property
    def subblocks(self) -> list[tuple[int, int]]:
        """The subblocks of a tile, as pairs: the index of the unit, and the index of the subblock
        in the unit."""
        if self.unit == 1:
            return [(0, 0)]
        return [
            (unit, index) for unit in range(self.tile) for index in range(self.subblocks_per_unit)
        ]

    @property
    def tokens(self) -> int:
        """The number of tokens of a subblock. They are multiplied together."""
        return self.tile if self.unit == 1 else self.unit // self.subblocks_per_unit

    def tile_rows(self, which: int) -> int:
        """Return the number of rows of numbers in a tile of keys (``which`` is 0) or values (1)."""
        return self.tile * self.formats[which].rows

    def planes(self, which: int) -> int:
        """Return the number of planes that are converted in shared memory; 0 if numbers are
        multiplied directly."""
        return self.formats[which].planes(self.queries, self.product)

    def plane_row(self, which: int, subblock: tuple[int, int]) -> tuple[int, int]:
        """Return the index of the plane that contains a subblock, and the subblock's first row in
        it."""
        unit, index = subblock
        form = self.formats[which]
        per_plane = self.subblocks_per_unit // form.subblocks
        return index // per_plane, unit * form.rows + index % per_plane * self.tokens

    def layout(self, kind: Callable[..., Layout]) -> Layout:
        """Return the register layout of an operand of the matrix product."""
        return kind(self.product, m_warps=self.warps)

    @property
    def lhs(self) -> Layout:
        """The layout of the left operand."""
        return self.layout(plgpu.Layout.MMA_LHS)

    @property
    def rhs(self) -> Layout:
        """The layout of the right operand."""
        return self.layout(plgpu.Layout.MMA_RHS)

    @property
    def acc(self) -> Layout:
        """The layout of the accumulator."""
        return self.layout(plgpu.Layout.MMA_ACC)

    def scratch(self, output_rows: int, barriers: bool) -> dict[str, Any]:
        """Return the arrays in shared memory, by name. ``output_rows`` is the number of rows that a
        program writes. ``barriers`` says whether barriers signal that a tile has arrived."""
        arrays: dict[str, Any] = {}
        transforms = (
            plgpu.TilingTransform((MMA_N, self.swizzle // 2)),
            plgpu.SwizzleTransform(self.swizzle),
        )
        for which, form in enumerate(self.formats):
            shape = self.stages, self.tile_rows(which), self.head_dim
            direct: Any = {} if self.planes(which) else {"transforms": transforms}
            arrays[f"fetched_{which}"] = plgpu.SMEM(shape, form.dtype, **direct)
            for name in form.token_arrays:
                scales = self.tile, form.groups, self.unit
                arrays[f"{name}_{which}"] = plgpu.SMEM(scales, jnp.float32)
        # Converted keys, which converted values overwrite. One plane follows the other.
        rows = max(self.planes(which) * self.tile_rows(which) for which in (0, 1))
        if rows:
            arrays["converted"] = plgpu.SMEM(
                (rows, self.head_dim), self.product, transforms=transforms
            )
        dtype = jnp.float32 if self.queries == jnp.float32 else self.product
        weights = len(self.subblocks), self.formats[1].groups, self.rows, self.tokens
        arrays["weights"] = plgpu.SMEM(weights, dtype)
        if output_rows < self.rows:
            arrays["output"] = plgpu.SMEM((self.rows, self.head_dim), jnp.float32)
        if barriers:
            arrays["arrived"] = plgpu.Barrier(num_arrivals=2, num_barriers=self.stages)
        return arrays

    def output_rows(self, rows: int) -> int:
        """Return how many rows of outputs a program writes for ``rows`` query rows. It is the
        smallest number that fills whole copies."""
        candidates = range(min(rows, self.rows), self.rows)
        return next((n for n in candidates if n * self.head_dim % COPY_NUMBERS == 0), self.rows)

    def shared_bytes(self, rows: int) -> int:
        """Return the bytes of shared memory for ``rows`` query rows. Each array is rounded up to
        KiB. The scratch memory of reductions across warps is included."""
        total = 2 * KIB
        for array in self.scratch(self.output_rows(rows), False).values():
            total += -(-array.dtype.itemsize * math.prod(array.shape) // KIB) * KIB
        return total


def plan_of(section: Section, head_dim: int, rows: int, dtype: DType) -> Plan | None:
    """Make the plan for ``rows`` query rows of a section; None if the kernel can't process them."""
    formats = [format_of(core_of(codec).codec, section.unit, head_dim) for codec in section.codecs]
    if None in formats or dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return None
    units = page = jax.tree.leaves(section.keys)[0].shape[2]
    if section.unit == 1 and units % MMA_N:
        return None
    if section.pages is None or section.pages.shape[1] == 1:
        page = 1 << 30  # a row's units are contiguous
    target = current_target()
    # Interpret mode uses the shared memory size of an H100.
    shared = (target if target.capability else Target("gpu", (9, 0))).shared_memory
    settings: Any = tuple(formats), section.unit, units, page & -page
    return _make_plan(*settings, head_dim, rows, jnp.dtype(dtype), shared // KIB)


@functools.lru_cache(maxsize=256)
def _make_plan(
    formats: tuple[StoreFormat, StoreFormat],
    unit: int,
    units: int,
    page: int,
    head_dim: int,
    rows: int,
    dtype: DType,
    shared: int,
) -> Plan | None:
    """Make the plan for a store of ``units`` units with ``shared`` KiB of shared memory. Runs of
    ``page`` units are contiguous."""
    query_rows = min(rows, MAX_QUERIES if head_dim <= 128 else MAX_QUERIES // 2)
    needed = -(-MIN_ROWS // min(form.rows for form in formats))
    sizes = (MAX_TOKENS, MAX_TOKENS // 2, MAX_TOKENS // 4) if unit == 1 else (needed,)
    widths = [head_dim // form.groups for form in formats]
    swizzle = next((s for s in (128, 64, 32) if all(n % (s // 2) == 0 for n in widths)), None)
    if swizzle is None:
        return None
    for limit, size, stages, warps in itertools.product(
        (PREFERRED_KIB, shared), sizes, range(MAX_STAGES, 1, -1), (1, 2, 4)
    ):
        tile = min(1 << size.bit_length() - 1, 1 << units.bit_length() - 1, page)
        if MMA_K * warps < query_rows and warps < 4:
            continue
        plan = Plan(formats, unit, head_dim, warps, tile, stages, dtype, swizzle)
        across = MMA_N * 4 // warps  # tokens, or channels, that all warps process together
        aligned = all(n % across == n % MMA_K == 0 for n in (plan.tokens, *widths))
        uniform = all(form.tokens_per_scale % plan.tokens == 0 for form in formats)
        if aligned and uniform and plan.shared_bytes(rows) <= min(limit, shared) * KIB:
            return plan
    return None


@dataclass(frozen=True)
class Operand:
    """The keys (``which`` is 0) or values (1) of one head in a program.

    ``arrays`` has their arrays in global memory, and ``shared`` the arrays in shared memory, both
    by name.
    """

    plan: Plan
    which: int
    arrays: dict[str, Ref]
    shared: dict[str, Ref]

    @property
    def format(self) -> StoreFormat:
        return self.plan.formats[self.which]

    def fetch(self, row: Array, unit: Array, stage: Array, arrived: Ref) -> None:
        """Start to copy the tile that begins at unit ``unit`` of the row (or page) ``row``."""
        count = self.plan.tile_rows(self.which)
        rows = self.arrays["numbers"].at[row, :, pl.ds(unit * self.format.rows, count)]
        plgpu.copy_gmem_to_smem(
            rows.at[0],
            self.shared[f"fetched_{self.which}"].at[stage],
            arrived,
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )

    def convert(self, row: Array, unit: Array, stage: Array) -> None:
        """Convert the numbers of a fetched tile, and load the scales of the tile's tokens."""
        plan, which = self.plan, self.which
        if plan.planes(which):
            shape = plan.tile_rows(which), plan.head_dim
            layout = plgpu.Layout.SMEM_GMEM_COPY(shape, plan.product, plan.swizzle)
            stored = plgpu.load(
                self.shared[f"fetched_{which}"].at[stage], layout=layout, optimized=False
            )
            for n, x in enumerate(self.format.convert(stored, plan.queries, plan.product)):
                into = self.shared["converted"].at[pl.ds(n * shape[0], shape[0])]
                plgpu.store(into, x, optimized=False)
        for name in self.format.token_arrays:
            for at, group in itertools.product(range(plan.tile), range(self.format.groups)):
                source = self.arrays[name].at[row, 0, unit + at, :, group]
                numbers = plgpu.load(source, layout=plan.rhs.reduce(0), optimized=False)
                into = self.shared[f"{name}_{which}"].at[at, group]
                plgpu.store(into, numbers.astype(jnp.float32), optimized=False)

    def numbers(self, subblock: tuple[int, int], stage: Array, group: int) -> list[Ref]:
        """Return references to the numbers of a subblock and a group of channels, one reference per
        16-bit term."""
        plan, width = self.plan, self.plan.head_dim // self.format.groups
        plane, first = plan.plane_row(self.which, subblock)
        channels = pl.ds(group * width, width)
        if not plan.planes(self.which):
            fetched = self.shared[f"fetched_{self.which}"]
            return [fetched.at[stage, pl.ds(first, plan.tokens), channels]]
        terms = range(plane, plane + self.format.terms(plan.queries))
        begins = [n * plan.tile_rows(self.which) + first for n in terms]
        return [self.shared["converted"].at[pl.ds(n, plan.tokens), channels] for n in begins]

    def token_scales(self, subblock: tuple[int, int], group: int) -> ScaleOffset:
        """Return the scales and offsets of a subblock's tokens, both float32[tokens]."""
        unit, index = subblock
        tokens = self.plan.tokens

        def load(name: str) -> Array:
            scales = self.shared[f"{name}_{self.which}"]
            own = scales.at[unit, group, pl.ds(index * tokens, tokens)]
            return plgpu.load(own, layout=self.plan.acc.reduce(0), optimized=False)

        return scale_offset(self.format, load, self.plan.plane_row(self.which, subblock)[0])

    def channel_scales(
        self,
        row: Array,
        unit: Array,
        subblock: tuple[int, int],
        channels: pl.Slice | slice,
        layout: Layout,
    ) -> ScaleOffset:
        """Return the scales and offsets of channels, both float32[channels]. If the codec stores
        means (``Centered``), they are added to the offsets."""
        form = self.format

        def load(name: str) -> Array:
            group = 0
            if name != "mean":
                group = subblock[1] * self.plan.tokens // form.tokens_per_scale
            numbers = self.arrays[name].at[row, 0, unit + subblock[0], group, channels]
            return plgpu.load(numbers, layout=layout, optimized=False).astype(jnp.float32)

        plane = self.plan.plane_row(self.which, subblock)[0]
        scales = ScaleOffset(None, None)
        if form.tokens_per_scale:
            scales = scale_offset(form, load, plane)
        if "mean" not in form.arrays:
            return scales
        mean = load("mean")
        return scales._replace(offset=mean if scales.offset is None else scales.offset + mean)
