"""Keys or values in a program of the Mosaic GPU kernel: fetched, and made into factors."""

import itertools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from kvjax.attention.kernels.mosaic_gpu_plan import Plan
from kvjax.attention.kernels.mosaic_gpu_stores import Form, Undone, undone
from kvjax.core.typing import Array

plgpu: Any = mosaic_gpu  # what of it is used here came with JAX 0.11 and 0.12


@dataclass(frozen=True)
class Side:
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
            how = plgpu.Layout.SMEM_GMEM_COPY(shape, plan.product, plan.swizzle)
            stored = plgpu.load(
                self.shared[f"fetched_{which}"].at[slot], layout=how, optimized=False
            )
            for n, x in enumerate(self.form.made(stored, plan.queries, plan.product)):
                into = self.shared["made"].at[pl.ds(n * shape[0], shape[0])]
                plgpu.store(into, x, optimized=False)
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
        channels = pl.ds(group * width, width)
        if not plan.planes(self.which):
            fetched = self.shared[f"fetched_{self.which}"]
            return [fetched.at[slot, pl.ds(first, plan.run), channels]]
        terms = range(plane, plane + self.form.terms(plan.queries))
        begins = [n * plan.rows_of(self.which) + first for n in terms]
        return [self.shared["made"].at[pl.ds(n, plan.run), channels] for n in begins]

    def of_tokens(self, run: tuple[int, int], group: int) -> Undone:
        """What undoes the numbers of a run's tokens: float32[run]."""
        unit, part = run

        def load(name: str) -> Array:
            kept = self.shared[f"{name}_{self.which}"]
            some = kept.at[unit, group, pl.ds(part * self.plan.run, self.plan.run)]
            return plgpu.load(some, layout=self.plan.sums.reduce(0), optimized=False)

        return undone(self.form, load, self.plan.where(self.which, run)[0])

    def of_channels(
        self, row: Any, unit: Any, run: tuple[int, int], channels: Any, layout: Any
    ) -> Undone:
        """What undoes the numbers of some channels, the means among them: float32[channels]."""
        form = self.form

        def load(name: str) -> Array:
            group = 0 if name == "mean" else run[1] * self.plan.run // form.along
            numbers = self.arrays[name].at[row, 0, unit + run[0], group, channels]
            return plgpu.load(numbers, layout=layout, optimized=False).astype(jnp.float32)

        plane = self.plan.where(self.which, run)[0]
        found = undone(form, load, plane) if form.along else Undone(None, None)
        if "mean" not in form.arrays:
            return found
        mean = load("mean")
        return found._replace(offset=mean if found.offset is None else found.offset + mean)
