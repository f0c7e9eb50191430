"""A kernel for NVIDIA's GPUs from Ampere on: queries over a long text, read as it is kept.

Flash decoding (Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023): a
program of four warps walks a share of a row's text, for one head of keys and some rows of queries,
with the online softmax (Dao, Fu, Ermon, Rudra and Ré, arXiv:2205.14135), and shares are merged by
log-sum-exp. Pieces of the text are fetched ahead into shared memory, by the copy engine of Hopper
and later (TMA) or by Ampere's ``cp.async``, and multiplied by ``mma`` of 16-bit numbers.

It is ``mosaic_gpu.kernel`` of Pallas. No device has run it: it is compiled for A100, L4, H100,
H200, B200 and others, and interpreted on CPUs, where races are looked for.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.attention.kernels.common import Reading, compiled, refuse
from kvjax.attention.kernels.mosaic_gpu_stores import (
    TERMS,
    Form,
    Undone,
    arrays_of,
    form_of,
    terms_of,
    undone,
)
from kvjax.attention.softmax import LOWEST, Partial
from kvjax.cache.sections import Section
from kvjax.codecs import in_tiles
from kvjax.core.target import current_target, default_device
from kvjax.core.typing import Array

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
SHARED = {(8, 0): 163, (9, 0): 227, (10, 0): 227}
"""KiB of shared memory that a program may have, by compute capability; others have 99."""
ROOM = 96
"""KiB that it takes, where fewer pieces are enough: so two programs run beside each other."""
GRAIN, LANES = 16, 8
"""What matrix units multiply together: rows and sums of so many, for so many tokens or channels."""
WHOLE = 128
"""Numbers that are written together."""

_compiled_for: set[tuple[int, int]] = set()


@dataclass(frozen=True)
class Plan:
    """How a call is divided.

    ``warps``: of four, those that divide rows of queries; the others divide tokens. ``piece``:
    units that are fetched together, and ``steps``: pieces in shared memory. ``run``: tokens that
    are multiplied together. ``product``: the dtype of what is multiplied, ``queries``: of queries.
    ``swizzles``: of keys and values in shared memory, bytes.
    """

    forms: tuple[Form, Form]
    unit: int
    head_dim: int
    warps: int
    piece: int
    steps: int
    queries: Any
    swizzles: tuple[int, int]

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
        for which, form in enumerate(self.forms):
            swizzle = self.swizzles[which]
            tiles = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
            shape, planes = (self.rows_of(which), self.head_dim), self.planes(which)
            direct = {} if planes else {"transforms": tiles}
            found[f"fetched_{which}"] = plgpu.SMEM((self.steps, *shape), form.dtype, **direct)
            if planes:
                found[f"made_{which}"] = plgpu.SMEM(
                    (planes, *shape), self.product, transforms=tiles
                )
            for name in form.of_tokens:
                each = self.piece, form.groups, self.unit
                found[f"{name}_{which}"] = plgpu.SMEM(each, jnp.float32)
        wide = self.queries == jnp.float32
        weights = len(self.runs), self.forms[1].groups, self.rows, self.run
        found["weights"] = plgpu.SMEM(weights, jnp.float32 if wide else self.product)
        if written < self.rows:
            found["mixed"] = plgpu.SMEM((self.rows, self.head_dim), jnp.float32)
        if fenced:
            found["arrived"] = plgpu.Barrier(num_arrivals=2, num_barriers=self.steps)
        return found

    def bytes(self) -> int:
        """Of all of that."""
        total = 4 * self.rows * self.head_dim + 1024
        for each in self.scratch(self.rows, False).values():
            total += -(-each.dtype.itemsize * _size(each.shape) // 1024) * 1024
        return total


def _size(shape: tuple[int, ...]) -> int:
    return functools.reduce(int.__mul__, shape, 1)


def decode(reading: Reading, before: Partial | None = None) -> Partial:
    """The softmax of rows of queries over a section, not yet divided by its total, merged with that
    over other keys, ``before``. Pieces before the first and behind the last that any of a row's
    queries sees are not read."""
    section = reading.section
    batch, kv_heads, rows, head_dim = reading.queries.shape
    dtype = reading.queries.dtype
    plan = _plan_of(section, head_dim, rows, dtype)
    refuse("pallas", {f"can't read {section.codecs} here": plan is None})
    assert plan is not None
    _check_kind_of_gpu()
    blocks = -(-rows // plan.rows)
    queries = jnp.pad(reading.queries, ((0, 0), (0, 0), (0, blocks * plan.rows - rows), (0, 0)))
    queries = queries.reshape(batch, kv_heads * blocks, plan.rows, head_dim)
    at = reading.at(blocks, plan.rows)
    scalars, _ = reading.scalars(plan.piece * section.unit, at)
    pieces = -(-(section.first + section.size) // plan.piece)
    splits = _splits(batch * kv_heads * blocks, pieces)
    groups = plan.forms[0].groups
    sums = queries.astype(jnp.float32).reshape(*queries.shape[:3], groups, -1).sum(-1)
    given = [queries, sums.swapaxes(2, 3), scalars, at]
    given += [] if section.pages is None else [section.pages]
    stores = [
        arrays_of(codec, store)
        for codec, store in zip(section.codecs, (section.keys, section.values), strict=True)
    ]
    # Rows of queries that there are, and as many more as make whole writes.
    written = next(n for n in (*range(min(rows, plan.rows), plan.rows), plan.rows)
                   if n * head_dim % WHOLE == 0)  # fmt: skip
    place = (batch, kv_heads * blocks, splits)
    shapes = (plan.rows,), (plan.rows,), (written, head_dim)
    bare, capability = reading.bare(), current_target().capability or (9, 0)
    units = stores[0][0].shape[2] // plan.forms[0].rows
    columns = 0 if section.pages is None else section.pages.shape[1]

    def run(*arrays: Array, interpret: Any) -> Any:
        interpret = plgpu.InterpretGPUParams() if interpret is True else interpret
        fenced = capability[0] >= 9 or bool(interpret)
        program = functools.partial(
            _program, bare, plan, blocks, splits, units, columns, written, fenced, bool(interpret)
        )
        return plgpu.kernel(
            program,
            out_type=[jax.ShapeDtypeStruct((*place, *x), jnp.float32) for x in shapes],
            grid=place,
            grid_names=("row", "head", "share"),
            scratch_types=plan.scratch(written, fenced),
            compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=2048),
            interpret=interpret or None,
        )(*arrays)

    highest, total, mixed = compiled(run, *given, *stores[0], *stores[1])
    missing = [(0, 0)] * 3 + [(0, plan.rows - written), (0, 0)]
    joined = Partial(highest, total, jnp.pad(mixed, missing)).joined(2)
    every = (x.reshape(batch, kv_heads, blocks * plan.rows, *x.shape[3:]) for x in joined)
    found = Partial(*(x[:, :, :rows] for x in every))
    found = found._replace(mixed=in_tiles(section.codecs[1]).unturn(found.mixed))
    return found if before is None else before.merge(found)


def refusals(section: Section, head_dim: int) -> dict[str, object]:
    """What the kernel can't read, and whether a section is such."""
    forms = [form_of(codec, section.unit, head_dim) for codec in section.codecs]
    known = None not in forms
    fits = known and _plan_of(section, head_dim, 1, jnp.dtype(jnp.float32)) is not None
    return {
        f"can't read {section.codecs} in a kernel": not known,
        f"takes multiples of {GRAIN} tokens and channels that share bytes and scales, and no more "
        "than fit in a GPU's shared memory": known and not fits,
    }


def _check_kind_of_gpu() -> None:
    """Raise ``ValueError`` where kernels have been compiled for other GPUs: JAX's compiler of them
    keeps to the first one's in a process."""
    capability = current_target().capability
    if capability is None or default_device().platform != "gpu":  # interpreted
        return
    if _compiled_for <= {capability}:
        _compiled_for.add(capability)
        return
    first = ".".join(map(str, next(iter(_compiled_for))))
    raise ValueError(
        f"this process has compiled kernels for GPUs of compute capability {first}, and JAX "
        "compiles them for one kind of GPU in a process: compile for "
        f"{'.'.join(map(str, capability))} in another process"
    )


def _plan_of(section: Section, head_dim: int, rows: int, dtype: Any) -> Plan | None:
    """How a call over a section is divided; None where it can't be."""
    forms = [form_of(codec, section.unit, head_dim) for codec in section.codecs]
    if None in forms or dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return None
    units = page = jax.tree.leaves(section.keys)[0].shape[2]
    if section.pages is None or section.pages.shape[1] == 1:
        page = 1 << 30  # units of a row alone, one behind the other
    capability = current_target().capability or (9, 0)
    settings: Any = tuple(forms), section.unit, units, page & -page
    return _planned(*settings, head_dim, rows, jnp.dtype(dtype), SHARED.get(capability, 99))


@functools.lru_cache(maxsize=256)
def _planned(
    forms: tuple[Form, Form], unit: int, units: int, page: int, head_dim: int, rows: int, dtype: Any,
    shared: int,
) -> Plan | None:  # fmt: skip
    """``_plan_of`` for a store of so many units, which ``page`` divides."""
    wanted = min(rows, MOST if head_dim <= 128 else MOST // 2)
    needed = -(-FETCHED // min(form.rows for form in forms))
    sizes = (TOKENS, TOKENS // 2, TOKENS // 4) if unit == 1 else (needed, 1)
    swizzles = [
        next((s for s in (128, 64, 32) if head_dim // form.groups % (s // 2) == 0), 0)
        for form in forms
    ]
    if 0 in swizzles:
        return None
    for most, size, steps, warps in itertools.product(
        (ROOM, shared), sizes, range(AHEAD, 1, -1), (1, 2, 4)
    ):
        piece = min(1 << size.bit_length() - 1, 1 << units.bit_length() - 1, page)
        if GRAIN * warps < wanted and warps < 4:
            continue
        plan = Plan(forms, unit, head_dim, warps, piece, steps, dtype, tuple(swizzles))
        across = LANES * 4 // warps  # tokens, or channels, that all warps take together
        widths = [head_dim // form.groups for form in forms]
        whole = all(n % across == n % GRAIN == 0 for n in (plan.run, *widths))
        along = all(form.along % plan.run == 0 for form in forms)
        if whole and along and plan.bytes() <= min(most, shared) * 1024:
            return plan
    return None


def _splits(programs: int, pieces: int) -> int:
    """Programs that share a row's text: so many that all units of a GPU have work, but with some
    pieces each."""
    wanted = max(PROGRAMS // programs, 1)
    return min(1 << wanted.bit_length() - 1, 1 << max(pieces // FEWEST, 1).bit_length() - 1)


@dataclass(frozen=True)
class _Side:
    """Keys or values in a program: which they are, their arrays of one head of keys in the device's
    memory by name, and shared memory by name."""

    plan: Plan
    which: int
    arrays: dict[str, Any]
    shared: dict[str, Any]

    @property
    def form(self) -> Form:
        return self.plan.forms[self.which]

    def fetch(self, row: Any, unit: Any, slot: Any, arrived: Any) -> None:
        """Have a piece fetched, of a row or a page, from a unit on."""
        count = self.plan.rows_of(self.which)
        rows = self.arrays["numbers"].at[row, :, pl.ds(unit * self.form.rows, count)]
        plgpu.copy_gmem_to_smem(
            rows.at[0], self.shared[f"fetched_{self.which}"].at[slot], arrived,
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )  # fmt: skip

    def make(self, row: Any, unit: Any, slot: Any) -> None:
        """Make the numbers of a fetched piece, and what undoes those of its tokens."""
        plan, which = self.plan, self.which
        if plan.planes(which):
            shape = plan.rows_of(which), plan.head_dim
            how = plgpu.Layout.SMEM_GMEM_COPY(shape, plan.product, plan.swizzles[which])
            stored = plgpu.load(
                self.shared[f"fetched_{which}"].at[slot], layout=how, optimized=False
            )
            for n, x in enumerate(self.form.made(stored, plan.queries, plan.product)):
                plgpu.store(self.shared[f"made_{which}"].at[n], x, optimized=False)
        for name in self.form.of_tokens:
            for at, group in itertools.product(range(plan.piece), range(self.form.groups)):
                source = self.arrays[name].at[row, 0, unit + at, :, group]
                numbers = plgpu.load(source, layout=plan.second.reduce(0), optimized=False)
                into = self.shared[f"{name}_{which}"].at[at, group]
                plgpu.store(into, numbers.astype(jnp.float32), optimized=False)

    def numbers(self, run: tuple[int, int], slot: Any, group: int) -> list[Any]:
        """Of a run's tokens and a group's channels: references to 16-bit numbers that add up."""
        plan, width = self.plan, self.plan.head_dim // self.form.groups
        plane, first = plan.where(self.which, run)
        some = pl.ds(first, plan.run), pl.ds(group * width, width)
        if not plan.planes(self.which):
            return [self.shared[f"fetched_{self.which}"].at[(slot, *some)]]
        made = self.shared[f"made_{self.which}"]
        terms = self.form.terms(plan.queries)
        return [made.at[(plane + n, *some)] for n in range(terms)]

    def of_tokens(self, run: tuple[int, int], group: int) -> Undone:
        """What undoes the numbers of a run's tokens: float32[run]."""
        unit, part = run

        def load(name: str) -> Array:
            kept = self.shared[f"{name}_{self.which}"]
            some = kept.at[unit, group, pl.ds(part * self.plan.run, self.plan.run)]
            return plgpu.load(some, layout=self.plan.sums.reduce(0), optimized=False)

        return undone(self.form, load, self.plan.where(self.which, run)[0])

    def of_channels(self, row: Any, unit: Any, run: tuple[int, int], layout: Any) -> Undone:
        """What undoes the numbers of channels, the means among them: float32[head_dim]."""
        form = self.form

        def load(name: str) -> Array:
            group = 0 if name == "mean" else run[1] * self.plan.run // form.along
            numbers = self.arrays[name].at[row, 0, unit + run[0], group]
            return plgpu.load(numbers, layout=layout, optimized=False).astype(jnp.float32)

        plane = self.plan.where(self.which, run)[0]
        found = undone(form, load, plane) if form.along else Undone(None, None)
        if "mean" not in form.arrays:
            return found
        mean = load("mean")
        return found._replace(offset=mean if found.offset is None else found.offset + mean)


def _program(
    reading: Reading, plan: Plan, blocks: int, splits: int, units: int, columns: int, written: int,
    fenced: bool, interpreted: bool, *refs: Any, **shared: Any,
) -> None:  # fmt: skip
    """One program: a share of a row's pieces, for a block of queries and their head of keys.

    ``units``: of a page, or of a row without; ``columns``: pages of a row, 0 where there are none.
    ``written``: rows of queries whose mixtures are written. ``fenced``: whether the copy engine
    fetches, and barriers tell what has arrived.
    """
    row, head, share = (lax.axis_index(name) for name in ("row", "head", "share"))
    queries_ref, sums_ref, scalars_ref, at_ref, *rest = refs[:-3]
    outs = [ref.at[row, head, share] for ref in refs[-3:]]
    table_ref = rest.pop(0) if columns else None
    block, own = lax.rem(head, blocks), lax.div(head, blocks)
    sides = []
    for which, form in enumerate(plan.forms):
        given = [rest.pop(0) for _ in form.arrays]
        # What all heads have in common has one.
        heads = [ref.at[:, pl.ds(own if ref.shape[1] > 1 else 0, 1)] for ref in given]
        sides.append(_Side(plan, which, dict(zip(form.arrays, heads, strict=True)), shared))
    keys, values = sides
    numbers = [scalars_ref[row, block, n] for n in range(2, scalars_ref.shape[2])]
    each = lax.div(scalars_ref[row, block, 1] + splits - 1, splits)
    begin = scalars_ref[row, block, 0] + share * each
    end = jnp.minimum(begin + each, scalars_ref[row, block, 0] + scalars_ref[row, block, 1])
    count, steps, tokens = max(columns, 1) * units, plan.steps, plan.piece * plan.unit

    def where(piece: Any) -> tuple[Any, Any, Any]:
        """The first unit of a piece; and the row or page it is of, and where there. A last piece
        that would pass the end is moved down; what it shares is not seen twice."""
        start = jnp.minimum(piece * plan.piece, count - plan.piece)
        if table_ref is None:
            return start, row, start
        page = table_ref[row, lax.div(start, jnp.int32(units))]
        return start, jnp.maximum(page, 0), lax.rem(start, jnp.int32(units))

    def fetch(piece: Any) -> None:
        _, place, unit = where(piece)
        slot = lax.rem(piece - begin, jnp.int32(steps))
        arrived = shared["arrived"].at[slot] if fenced else None
        for side in sides:
            side.fetch(place, unit, slot, arrived)

    def wait(piece: Any, slot: Any) -> None:
        if fenced:
            plgpu.barrier_wait(shared["arrived"].at[slot])
            return
        # Each copy is a group of its own; near the end there are fewer behind this piece's.
        more = piece + steps - 2 < end
        pl.when(more)(lambda: plgpu.wait_gmem_to_smem(2 * (steps - 2)))
        pl.when(jnp.logical_not(more))(lambda: plgpu.wait_gmem_to_smem(0))

    def times(a: list[Array], b: list[Any], into: Array, turned: bool = False) -> Array:
        """A product of sums of terms; of those of numbers of 32 bits as many as count."""
        most = max(len(a), len(b))
        loaded = [
            plgpu.load(x.transpose((1, 0)) if turned else x, layout=plan.second, optimized=False)
            for x in b
        ]
        return functools.reduce(
            lambda total, pair: _dot(total, a[pair[0]], loaded[pair[1]], interpreted),
            [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < most],
            into,
        )

    def zeros(*shape: int) -> Array:
        layout = plan.sums if len(shape) == 2 else plan.sums.reduce(1)
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)

    rows, head_dim, run = plan.rows, plan.head_dim, plan.run
    wide = plan.queries == jnp.float32
    some = TERMS if wide else 1
    queries = plgpu.load(queries_ref.at[row, head], layout=plan.first, optimized=False)
    queries = queries.astype(jnp.float32)
    plain = terms_of(queries, plan.product, some)
    at = plgpu.load(at_ref.at[row, block], layout=plan.sums.reduce(1), optimized=False)
    at = lax.broadcast_in_dim(at, (rows, run), (0,))
    groups, widths = (
        [form.groups for form in plan.forms],
        [head_dim // form.groups for form in plan.forms],
    )
    sums = [
        plgpu.load(sums_ref.at[row, head, n], layout=plan.sums.reduce(1), optimized=False)
        for n in range(groups[0])
    ]

    def scores_of(which: tuple[int, int], place: Any, unit: Any, slot: Any) -> Array:
        """Of a run of keys: float32[rows, run]."""
        terms, offset = plain, None
        if keys.form.along or "mean" in keys.form.arrays:
            factor, more = keys.of_channels(place, unit, which, plan.first.reduce(0))
            if factor is not None:
                terms = terms_of(queries * _down(factor, queries), plan.product, some)
            if more is not None:
                offset = jnp.sum(queries * _down(more, queries), axis=1)
                offset = plgpu.layout_cast(offset, plan.sums.reduce(1))
        total = None
        for group in range(groups[0]):
            part = slice(group * widths[0], (group + 1) * widths[0])
            found = keys.numbers(which, slot, group)
            product = times([x[:, part] for x in terms], found, zeros(rows, run), turned=True)
            if keys.form.of_tokens:
                factor, more = keys.of_tokens(which, group)
                if factor is not None:
                    product = product * _down(factor, product)
                if more is not None:
                    product = product + _along(sums[group], product) * _down(more, product)
            total = product if total is None else total + product
        assert total is not None
        return total if offset is None else total + _along(offset, total)

    def seen_of(which: tuple[int, int], piece: Any, start: Any) -> tuple[Array, Array]:
        """Which of a run's tokens queries see, and the first slot."""
        first = (start + which[0]) * plan.unit + which[1] * run
        slots = plgpu.broadcasted_iota(jnp.int32, (rows, run), 1, layout=plan.sums) + first
        positions = reading.positions(slots, numbers)
        positions = jnp.where(slots >= piece * tokens, positions, -1)
        return reading.sees(at, positions, numbers), first

    def there(first: Any, piece: Any, shape: tuple[int, int]) -> Array:
        """Whether a run's slots hold tokens, for numbers of them [run, channels]."""
        slots = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plan.second) + first
        return (reading.positions(slots, numbers) >= 0) & (slots >= piece * tokens)

    def weigh(which: int, weights: Array, carry: list[Array]) -> list[Array]:
        """Keep a run's weights for the product with values: scaled by what undoes each token's
        number in each group. ``carry``: weights times what is added to a group's numbers."""
        after = list(carry)
        for group in range(groups[1]):
            scaled, more = weights, None
            if values.form.of_tokens:
                factor, more = values.of_tokens(plan.runs[which], group)
                assert factor is not None
                scaled = weights * _down(factor, weights)
            kept = scaled.astype(shared["weights"].dtype)
            plgpu.store(shared["weights"].at[which, group], kept, optimized=False)
            if more is None:
                continue
            if values.form.middle:  # of the weights as they are rounded: so their errors cancel
                plane = plan.where(1, plan.runs[which])[0]
                lower = values.form.middle * values.form.shift(plane)
                after[group] = after[group] - kept.astype(jnp.float32) * lower
            else:
                after[group] = after[group] + weights * _down(more, weights)
        return after

    def mixed_with(
        which: int, mixed: list[Array], piece: Any, first: Any, place: Any, unit: Any, slot: Any
    ) -> list[Array]:
        """Mixtures, float32[rows, width] of each group, with a run's values."""
        found = []
        raw = "scale" not in values.form.arrays
        for group, total in enumerate(mixed):
            weights = plgpu.load(
                shared["weights"].at[which, group], layout=plan.first, optimized=False
            )
            terms = (
                terms_of(weights.astype(jnp.float32), plan.product, TERMS) if wide else [weights]
            )
            refs = values.numbers(plan.runs[which], slot, group)
            loaded = [plgpu.load(x, layout=plan.second, optimized=False) for x in refs]
            if raw:  # no weight makes 0 of what is no number
                seen = there(first, piece, (run, widths[1]))
                loaded = [jnp.where(seen, x, jnp.zeros_like(x)) for x in loaded]
            most = max(len(terms), len(loaded))
            pairs = [
                (a, b) for a, b in itertools.product(range(len(terms)), range(len(loaded)))
                if a + b < most
            ]  # fmt: skip
            factor = offset = None
            if values.form.along or "mean" in values.form.arrays:
                factor, offset = values.of_channels(
                    place, unit, plan.runs[which], plan.sums.reduce(0)
                )
            product = total if factor is None else zeros(rows, widths[1])
            for a, b in pairs:
                product = _dot(product, terms[a], loaded[b], interpreted)
            if factor is not None:
                product = total + product * _down(factor, product)
            if offset is not None:
                ones = plgpu.layout_cast(jnp.ones((run, widths[1]), plan.product), plan.second)
                every = zeros(rows, widths[1])
                for term in terms:
                    every = _dot(every, term, ones, interpreted)
                part = offset  # groups of channels have none of their own beside means
                if groups[1] > 1:
                    part = offset[group * widths[1] : (group + 1) * widths[1]]
                product = product + every * _down(part, product)
            found.append(product)
        return found

    def visit(piece: Any, carry: Any) -> Any:
        highest, total, mixed, added = carry
        slot = lax.rem(piece - begin, jnp.int32(steps))
        wait(piece, slot)
        if fenced:
            plgpu.commit_smem()  # what was read of the next slot was read
        pl.when(piece + steps - 1 < end)(lambda: fetch(piece + steps - 1))
        start, place, unit = where(piece)
        for side in sides:
            side.make(place, unit, slot)
        scores, firsts = [], []
        for which in plan.runs:
            products = reading.scores(scores_of(which, place, unit, slot))
            seen, first = seen_of(which, piece, start)
            scores.append(jnp.where(seen, products, LOWEST))
            firsts.append(first)
        above = jnp.max(functools.reduce(jnp.maximum, scores), axis=1)
        above = jnp.maximum(highest, jnp.maximum(above, LOWEST / 2))  # see Partial.of
        shrink = jnp.exp(highest - above)
        total = total * _along(shrink, total)
        added = [x * _along(shrink, x) for x in added]
        for n, products in enumerate(scores):
            weights = jnp.exp(products - _along(above, products))
            total = total + weights
            added = weigh(n, weights, added)
        mixed = [x * _along(shrink, x) for x in mixed]
        for n in range(len(plan.runs)):
            mixed = mixed_with(n, mixed, piece, firsts[n], place, unit, slot)
        return above, total, mixed, added

    for n in range(steps - 1):
        pl.when(begin + n < end)(functools.partial(fetch, begin + n))
    adding = groups[1] if values.form.of_tokens and (
        values.form.middle or "zero" in values.form.arrays
    ) else 0  # fmt: skip
    highest, total, mixed, added = lax.fori_loop(
        begin, end, visit,
        (zeros(rows) + LOWEST, zeros(rows, run), [zeros(rows, widths[1])] * groups[1],
         [zeros(rows, run)] * adding),
    )  # fmt: skip
    for n, x in enumerate(added):
        mixed[n] = mixed[n] + _along(jnp.sum(x, axis=1), mixed[n])
    plgpu.store(outs[0], highest, optimized=False)
    plgpu.store(outs[1], jnp.sum(total, axis=1), optimized=False)
    into = shared.get("mixed", outs[2])
    for n, x in enumerate(mixed):
        plgpu.store(into.at[:, pl.ds(n * widths[1], widths[1])], x, optimized=False)
    if "mixed" in shared:
        plgpu.store(outs[2], into[pl.ds(0, written)], optimized=False)


def _dot(total: Array, a: Array, b: Array, interpreted: bool) -> Array:
    """A product of matrices, added to ``total``. What is interpreted knows no ``mma``."""
    if interpreted:
        return total + jnp.dot(a, b, preferred_element_type=jnp.float32)
    return plgpu.mma(total, a, b)


def _down(numbers: Array, like: Array) -> Array:
    """Numbers [columns], the same in all rows."""
    return lax.broadcast_in_dim(numbers, like.shape, (1,))


def _along(numbers: Array, like: Array) -> Array:
    """Numbers [rows], the same in all columns."""
    return lax.broadcast_in_dim(numbers, like.shape, (0,))
