"""Meshes of devices, and how a cache is sharded over one."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.core.mesh_context import check_mesh_context
from kvjax.core.target import Target, default_device, target_of
from kvjax.core.topology import target_devices
from kvjax.core.transfer import default_memory_kind, put_on_mesh
from kvjax.core.validation import as_int, is_traced
from kvjax.placement.order import Order

DATA, TENSOR, SEQUENCE = AXES = ("data", "tensor", "sequence")
"""Of the rows, of the heads, and of the slots."""
_STAGES = ("stage", "stages", "pipe", "pipeline", "pp")


def make_mesh(*, data: int = 1, tensor: int = 1, sequence: int = 1, devices: Any = None) -> Mesh:
    """A mesh for ``init_cache``, ``models.load`` and ``generate``.

    Args:
      data: shares of the rows of a batch.
      tensor: shares of the heads, and of the weights. Where the model has fewer key-value heads,
        devices have copies of them.
      sequence: shares of the positions of a text, for texts that one device has no memory for.
      devices: which; by default the first of all, of every process. Or the name of a kind of
        device that need not be here, ``"v5e"`` or ``"h200"``, of which so many are taken, to
        compile for.

    Raises:
      ValueError: if a number is not whole and positive, there are fewer devices, or ``devices``
        is no list of different ones.
      MissingCompilerError: if ``devices`` is a name, and its compiler is not installed.
    """
    sizes = {DATA: data, TENSOR: tensor, SEQUENCE: sequence}
    sizes = {name: as_int(name, size, 1) for name, size in sizes.items()}
    if isinstance(devices, str):
        devices = target_devices(devices, math.prod(sizes.values()))
    if devices is not None and not _are_devices(devices):
        raise ValueError(f"devices must be a list of different jax.Device, got {devices!r:.80}")
    devices = jax.devices() if devices is None else list(np.ravel(np.asarray(devices, object)))
    count = math.prod(sizes.values())
    if count > len(devices):
        asked = " x ".join(f"{name}={size}" for name, size in sizes.items())
        more = f"XLA_FLAGS=--xla_force_host_platform_device_count={count} simulates so many"
        hint = f" ({more})" if all(each.platform == "cpu" for each in devices) else ""
        raise ValueError(f"a mesh {asked} is of {count} devices: there are {len(devices)}{hint}")
    shape, kinds = tuple(sizes.values()), (AxisType.Auto,) * 3
    return jax.make_mesh(shape, AXES, axis_types=kinds, devices=devices[:count])


def _are_devices(given: Any) -> bool:
    if not isinstance(given, Sequence | np.ndarray):
        return False
    found = list(np.ravel(np.asarray(given, object)))
    return all(isinstance(each, jax.Device) for each in found) and len(set(found)) == len(found)


def parse_mesh(text: str) -> dict[str, int]:
    """``data=2,tensor=4`` as the arguments of ``make_mesh``.

    Raises:
      ValueError: if it is written otherwise, or names another axis.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (words.strip() for words in part.partition("="))
        if equals:
            refuse_axis(name)
        if not equals or not size.isdecimal() or name in found:
            raise ValueError(
                f"a mesh is written as data=2,tensor=4,sequence=1, each once, or auto; got {text!r}"
            )
        found[name] = as_int(name, int(size), 1)
    return found


def refuse_axis(name: Any) -> None:
    """Raise ``ValueError`` for an axis that is none of a mesh's."""
    if name in _STAGES:
        raise ValueError(
            f"the mesh has an axis {name!r}: layers are not divided into stages, where a step "
            "would wait for one device after the other; use tensor, whose devices work together"
        )
    if name not in AXES:
        raise ValueError(f"the mesh has an axis {name!r}: there are {', '.join(AXES)}")


COPIES = "copies"
"""The axis of a ``MeshSharding`` of devices that share their key-value heads with one another."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class MeshSharding:
    """How the arrays of a model with so many key-value heads are spread over a mesh.

    ``mesh``: a ``Mesh``, or an ``AbstractMesh`` to plan for; its axes, with ``tensor`` divided in
    two: ``tensor``, as many shares as heads can be divided into, and ``copies``, devices that have
    the same heads.
    """

    mesh: Any

    def __reduce__(self) -> Any:
        raise ValueError(
            "what is spread over a mesh can't be pickled, for a mesh is of this process: "
            "kvjax.migrate(cache, mesh=None) brings it to one device first"
        )

    def __copy__(self) -> "Spread":
        return self

    def __deepcopy__(self, memo: Any) -> "Spread":
        return self

    @property
    def rows(self) -> int:
        """Shares of the batch."""
        return self.size(DATA)

    @property
    def heads(self) -> int:
        """Shares of the key-value heads."""
        return self.size(TENSOR)

    @property
    def copies(self) -> int:
        """Devices that have the same key-value heads."""
        return self.size(COPIES)

    @property
    def parts(self) -> int:
        """Shares of the slots."""
        return self.size(SEQUENCE)

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.mesh.size

    @property
    def target(self) -> Target:
        """What its devices are."""
        if isinstance(self.mesh, AbstractMesh):
            return target_of(default_device())
        return target_of(self.mesh.devices.flat[0])

    def spec(self, *axes: str | tuple[str, ...] | None) -> PartitionSpec:
        """A spec, in the one form that compiled programs give back as well: axes of one device, and
        what stands behind the last axis, are left out."""
        names = [(axis,) if isinstance(axis, str) else axis or () for axis in axes]
        real = [tuple(name for name in each if self.size(name) > 1) for each in names]
        while real and not real[-1]:
            real.pop()
        return PartitionSpec(*(each[0] if len(each) == 1 else each or None for each in real))

    def sharding(self, spec: PartitionSpec, kind: str | None = None) -> NamedSharding:
        """The sharding of a spec, in a kind of memory, by default the devices' own."""
        if kind is None and isinstance(self.mesh, Mesh):
            device, *_ = self.mesh.local_devices or self.mesh.devices.flat
            kind = default_memory_kind(device)
        return NamedSharding(self.mesh, spec, memory_kind=kind)

    def row_spec(self, shape: tuple[int, ...] = (1,)) -> PartitionSpec:
        """Of an array [batch, ...]; a number is everywhere."""
        return self.spec(DATA) if shape else PartitionSpec()

    def batch_spec(self, shape: tuple[int, ...], batch: int) -> PartitionSpec:
        """Of an array that may have a number, or more, for every row."""
        return self.spec(DATA) if shape[:1] == (batch,) else PartitionSpec()

    def token_spec(self, shape: tuple[int, ...] = ()) -> PartitionSpec:
        """Of keys or values [batch, kv_heads, new, head_dim], and of a tail."""
        return self.spec(DATA, TENSOR)

    def query_spec(self, heads: int, kv_heads: int) -> PartitionSpec:
        """Of queries [batch, heads, new, head_dim]. Devices with copies of one head divide its
        queries where that comes out even; else each has all of them."""
        alone = kv_heads == self.heads and self.divides(heads)
        return self.spec(DATA, (TENSOR, COPIES) if alone else TENSOR)

    def divides(self, heads: int) -> bool:
        """Whether every device can have as many queries' heads as every other."""
        return heads % (self.heads * self.copies) == 0

    def body_specs(self, body: Any, orders: Any) -> Any:
        """Of a body's arrays [batch, kv_heads, ...], whose slots are where their orders say; what
        heads have in common is everywhere."""

        def one(x: Any, order: Order) -> PartitionSpec:
            if order.axis == 1:  # heads stand behind it
                return self.spec(DATA, SEQUENCE, TENSOR if order.separate_heads else None)
            between = [None] * (order.axis - 2)
            return self.spec(DATA, TENSOR if x.shape[1] > 1 else None, *between, SEQUENCE)

        return jax.tree.map(one, body, orders)

    def check_mesh_context(self) -> None:
        """Raise ``ValueError`` where ``jax.set_mesh`` has set another mesh than the user's."""
        sizes = {name: size for name, size in self.mesh.shape.items() if name != COPIES}
        check_mesh_context(sizes | {TENSOR: self.heads * self.copies} if TENSOR in sizes else sizes)

    def check_rows(self, rows: int) -> None:
        """Raise ``ValueError`` for rows that can't be divided."""
        if rows % self.rows:
            raise ValueError(
                f"{rows} rows can't be divided among data={self.rows}: give a multiple"
            )

    def put(
        self, tree: _T, spec: Callable[[tuple[int, ...]], PartitionSpec], kind: Any = None
    ) -> _T:
        """A pytree's arrays, spread by their shapes; inside ``jit`` too."""
        self.check_context()

        return jax.tree.map(lambda x: self._put(x, spec(np.shape(x)), kind), tree)

    def put_bodies(self, body: _T, orders: Any, kind: Any = None) -> _T:
        """A body's arrays, spread; inside ``jit`` too."""
        self.check_context()
        specs = self.body_specs(body, orders)
        return jax.tree.map(lambda x, spec: self._put(x, spec, kind), body, specs)

    def put_with_specs(self, tree: _T, specs: Any, kind: Any = None) -> _T:
        """A pytree's arrays, spread by specs; inside ``jit`` too."""
        self.check_context()
        return jax.tree.map(lambda x, spec: self._put(x, spec, kind), tree, specs)

    def _put(self, x: Any, found: PartitionSpec, kind: Any) -> Any:
        near = put_on_mesh(x, self.sharding(found)) if kind is None or is_traced(x) else x
        if is_traced(near) and isinstance(self.mesh, Mesh):
            # A move to the memory where it is already says nothing to the compiler.
            near = jax.lax.with_sharding_constraint(near, self.sharding(found))
        return near if kind is None else put_on_mesh(near, self.sharding(found, kind))

    def run(self, call: Callable[..., _T], given: Any, found: Any, *args: Any) -> _T:
        """``call`` on every device, with what it has of ``args``. ``given``, ``found``: specs of
        the arguments and of the result."""
        mapped = jax.shard_map(
            call, mesh=self.mesh, in_specs=given, out_specs=found, check_vma=False
        )
        if jax.sharding.get_abstract_mesh().empty:
            return mapped(*args)
        self.check_context()
        mesh = self.mesh if isinstance(self.mesh, AbstractMesh) else self.mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(mesh):  # its axes are those of the specs
            return mapped(*args)

    def index(self, axis: str) -> Any:
        """Which share of an axis a device has, in ``run``; 0 where it is not divided."""
        return jax.lax.axis_index(axis) if self.size(axis) > 1 else 0

    def size(self, axis: str) -> int:
        """How many shares an axis has."""
        return self.mesh.shape.get(axis, 1)


def shard_over(mesh: Mesh | AbstractMesh, kv_heads: int) -> MeshSharding:
    """How a model of so many key-value heads is spread over a mesh.

    Raises:
      ValueError: if it is none, has axes other than ``data``, ``tensor`` and ``sequence``, or no
        device of this process.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"a mesh is a jax.sharding.Mesh, as of kvjax.make_mesh, got {mesh!r:.80}")
    return _spread_over(mesh, kv_heads)


@functools.lru_cache(maxsize=256)
def _spread_over(mesh: Mesh | AbstractMesh, kv_heads: int) -> MeshSharding:
    if isinstance(mesh, Mesh) and not mesh.local_devices:
        raise ValueError(
            f"the mesh has {mesh.size} devices, and none of process {jax.process_index()}: every "
            "process that takes part must have some"
        )
    sizes: dict[str, int] = {}
    for name, size in mesh.shape.items():
        refuse_axis(name)
        sizes[str(name)] = size
        if name == TENSOR:
            sizes[TENSOR] = math.gcd(size, kv_heads)
            sizes[COPIES] = size // sizes[TENSOR]
    names, shape, kinds = tuple(sizes), tuple(sizes.values()), (AxisType.Auto,) * len(sizes)
    if isinstance(mesh, AbstractMesh):
        return MeshSharding(AbstractMesh(shape, names, axis_types=kinds))
    return MeshSharding(Mesh(mesh.devices.reshape(shape), names, axis_types=kinds))
