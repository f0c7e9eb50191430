"""Meshes of devices, and the sharding of a cache over a mesh."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import PyTree

from kvjax.core.mesh_context import check_mesh_context
from kvjax.core.target import Target, default_device, target_of
from kvjax.core.topology import target_devices
from kvjax.core.transfer import default_memory_kind, put_on_mesh
from kvjax.core.validation import ArgumentError, as_int, is_traced
from kvjax.placement.order import Order, Orders

DATA, TENSOR, SEQUENCE = AXES = ("data", "tensor", "sequence")
"""The mesh axes: they divide the rows, the heads and the slots."""
_STAGES = ("stage", "stages", "pipe", "pipeline", "pp")


def make_mesh(*, data: int = 1, tensor: int = 1, sequence: int = 1, devices: Any = None) -> Mesh:
    """Create a mesh for ``init_cache``, ``models.load`` and ``generate``.

    Args:
      data: the number of devices among which the rows of a batch are divided.
      tensor: the number of devices among which heads and weights are divided. If the model has
        fewer key-value heads, several devices have the same head.
      sequence: the number of devices among which the slots of a row are divided, for sequences that
        do not fit in one device's memory.
      devices: the devices; by default the first of ``jax.devices()``. It may also be the name of a
        type of target device, such as ``"v5e"`` or ``"h200"``, which need not be attached.

    Raises:
      ValueError: if a number is not a positive integer, there are too few devices, or ``devices``
        is not a list of different devices.
      MissingCompilerError: if ``devices`` is a name whose compiler is not installed.

    Example:
      ```python
      mesh = kvjax.make_mesh(tensor=1)  # tensor=2 divides heads and weights among two devices
      cache = kvjax.init_cache(lm.config, max_len=64, mesh=mesh)
      ```
    """
    sizes = {DATA: data, TENSOR: tensor, SEQUENCE: sequence}
    sizes = {name: as_int(name, size, 1) for name, size in sizes.items()}
    if isinstance(devices, str):
        devices = target_devices(devices, math.prod(sizes.values()))
    if devices is not None and not _are_devices(devices):
        raise ArgumentError(
            f"devices must be a list of different jax.Device, got {devices!r:.80}", param="devices"
        )
    devices = jax.devices() if devices is None else list(np.ravel(np.asarray(devices, object)))
    count = math.prod(sizes.values())
    if count > len(devices):
        requested = " x ".join(f"{name}={size}" for name, size in sizes.items())
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={count} simulates {count}"
        hint = f" ({flag})" if all(device.platform == "cpu" for device in devices) else ""
        raise ValueError(
            f"a mesh {requested} needs {count} devices, but there are {len(devices)}{hint}"
        )
    shape, kinds = tuple(sizes.values()), (AxisType.Auto,) * 3
    return jax.make_mesh(shape, AXES, axis_types=kinds, devices=devices[:count])


def _are_devices(x: object) -> bool:
    """Return whether ``x`` is a sequence or array of different devices."""
    if not isinstance(x, Sequence | np.ndarray):
        return False
    flat = list(np.ravel(np.asarray(x, object)))
    return all(isinstance(device, jax.Device) for device in flat) and len(set(flat)) == len(flat)


def parse_mesh(text: str) -> dict[str, int]:
    """Parse ``data=2,tensor=4`` into the arguments of ``make_mesh``.

    Raises:
      ValueError: if ``text`` does not have this form, or names an unknown axis.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if equals:
            refuse_axis(name)
        if not equals or not size.isdecimal() or name in sizes:
            raise ValueError(
                f"a mesh must be auto, or sizes of axes such as data=2,tensor=4; got {text!r}"
            )
        sizes[name] = as_int(name, int(size), 1)
    return sizes


def refuse_axis(name: object) -> None:
    """Raise ``ValueError`` for an axis that kvjax does not support."""
    if name in _STAGES:
        raise ValueError(
            f"the mesh has an axis {name!r}: kvjax has no pipeline parallelism, where a step waits "
            "for one device after another; use tensor, whose devices work at the same time"
        )
    if name not in AXES:
        raise ValueError(f"the mesh has an axis {name!r}: kvjax supports {', '.join(AXES)}")


SpecOf = Callable[[tuple[int, ...]], PartitionSpec]
COPIES = "copies"
"""The axis of a ``MeshSharding`` along which devices have the same key-value heads."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class MeshSharding:
    """How the arrays of a cache are sharded over a mesh.

    ``data`` divides the rows, ``tensor`` the heads, and ``sequence`` the slots. Functions of the
    arrays run on each device's shard (``jax.shard_map``), with the same code as on one device.

    ``mesh`` is a ``Mesh``, or an ``AbstractMesh`` for planning. The user's ``tensor`` axis is split
    into two axes: ``tensor``, which divides the key-value heads, and ``copies``, along which
    devices have the same heads.
    """

    mesh: Mesh | AbstractMesh

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            "a cache on a mesh can't be pickled, because a mesh belongs to its process: "
            "kvjax.migrate(cache, mesh=None) moves it to one device first"
        )

    def __copy__(self) -> "MeshSharding":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "MeshSharding":
        return self

    @property
    def rows(self) -> int:
        """The number of shards of the rows."""
        return self.size(DATA)

    @property
    def heads(self) -> int:
        """The number of shards of the key-value heads."""
        return self.size(TENSOR)

    @property
    def copies(self) -> int:
        """The number of devices that have the same key-value heads."""
        return self.size(COPIES)

    @property
    def parts(self) -> int:
        """The number of shards of the slots."""
        return self.size(SEQUENCE)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.mesh.size

    @property
    def target(self) -> Target:
        """The kind of the devices."""
        if isinstance(self.mesh, AbstractMesh):
            return target_of(default_device())
        return target_of(self.mesh.devices.flat[0])

    def spec(self, *axes: str | tuple[str, ...] | None) -> PartitionSpec:
        """Make a ``PartitionSpec`` in the form that compiled programs return: without axes of size
        1 and without trailing ``None``."""
        names = [(axis,) if isinstance(axis, str) else axis or () for axis in axes]
        real = [tuple(name for name in entry if self.size(name) > 1) for entry in names]
        while real and not real[-1]:
            real.pop()
        return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in real))

    def sharding(self, spec: PartitionSpec, kind: str | None = None) -> NamedSharding:
        """Return the sharding for a spec, in a kind of memory. The default is the devices' default
        memory."""
        if kind is None and isinstance(self.mesh, Mesh):
            device, *_ = self.mesh.local_devices or self.mesh.devices.flat
            kind = default_memory_kind(device)
        return NamedSharding(self.mesh, spec, memory_kind=kind)

    def row_spec(self, shape: tuple[int, ...] = (1,)) -> PartitionSpec:
        """Return the spec of an array [batch, ...]. Scalars are replicated."""
        return self.spec(DATA) if shape else PartitionSpec()

    def batch_spec(self, shape: tuple[int, ...], batch: int) -> PartitionSpec:
        """Return the spec of an array. If its first axis is not ``batch``, it is replicated."""
        return self.spec(DATA) if shape[:1] == (batch,) else PartitionSpec()

    def token_spec(self, shape: tuple[int, ...] = ()) -> PartitionSpec:
        """Return the spec of keys or values [batch, kv_heads, new, head_dim], and of a tail."""
        return self.spec(DATA, TENSOR)

    def query_spec(self, heads: int, kv_heads: int) -> PartitionSpec:
        """Return the spec of queries [batch, heads, new, head_dim]. Devices that have the same
        key-value head divide its query heads if they can be divided evenly. Otherwise each has all
        of them."""
        even = kv_heads == self.heads and self.divides(heads)
        return self.spec(DATA, (TENSOR, COPIES) if even else TENSOR)

    def divides(self, heads: int) -> bool:
        """Return whether all devices can have the same number of query heads."""
        return heads % (self.heads * self.copies) == 0

    def body_specs(self, body: PyTree, orders: Orders) -> PyTree:
        """Return the specs of the arrays of a body. ``orders`` say which axis of each array has the
        slots. Arrays that all heads share are not divided along ``tensor``."""

        def one(x: jax.Array, order: Order) -> PartitionSpec:
            if order.axis == 1:  # the axis of heads follows
                return self.spec(DATA, SEQUENCE, TENSOR if order.separate_heads else None)
            between = [None] * (order.axis - 2)
            return self.spec(DATA, TENSOR if x.shape[1] > 1 else None, *between, SEQUENCE)

        return jax.tree.map(one, body, orders)

    def check_context(self) -> None:
        """Raise ``ValueError`` if ``jax.set_mesh`` has set a mesh other than this one."""
        sizes = {name: size for name, size in self.mesh.shape.items() if name != COPIES}
        check_mesh_context(sizes | {TENSOR: self.heads * self.copies} if TENSOR in sizes else sizes)

    def check_rows(self, rows: int) -> None:
        """Raise ``ValueError`` if ``rows`` can't be divided along ``data``."""
        if rows % self.rows:
            raise ValueError(
                f"{rows} rows can't be divided among data={self.rows}: give a multiple"
            )

    def put(self, tree: PyTree, spec: SpecOf, kind: str | None = None) -> PyTree:
        """Put a pytree of arrays on the mesh. ``spec`` is called with the shape of each array. This
        works inside ``jit``."""
        self.check_context()
        return jax.tree.map(lambda x: self._put(x, spec(np.shape(x)), kind), tree)

    def put_bodies(self, body: _T, orders: Orders, kind: str | None = None) -> _T:
        """Put the arrays of a body on the mesh. This works inside ``jit``."""
        return self.put_with_specs(body, self.body_specs(body, orders), kind)

    def put_with_specs(self, tree: _T, specs: PyTree, kind: str | None = None) -> _T:
        """Put a pytree of arrays on the mesh with the specs ``specs``. This works inside
        ``jit``."""
        self.check_context()
        return jax.tree.map(lambda x, spec: self._put(x, spec, kind), tree, specs)

    def _put(self, x: ArrayLike, spec: PartitionSpec, kind: str | None) -> ArrayLike:
        near = put_on_mesh(x, self.sharding(spec)) if kind is None or is_traced(x) else x
        if is_traced(near) and isinstance(self.mesh, Mesh):
            # The compiler ignores a move to the memory where the array already is.
            near = jax.lax.with_sharding_constraint(near, self.sharding(spec))
        return near if kind is None else put_on_mesh(near, self.sharding(spec, kind))

    def run(
        self, function: Callable[..., _T], in_specs: PyTree, out_specs: PyTree, *args: PyTree
    ) -> _T:
        """Apply ``function`` to each device's shards of ``args``, with ``jax.shard_map``."""
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        if jax.sharding.get_abstract_mesh().empty:
            return mapped(*args)
        self.check_context()
        mesh = self.mesh if isinstance(self.mesh, AbstractMesh) else self.mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(mesh):  # the specs name its axes
            return mapped(*args)

    def index(self, axis: str) -> Any:
        """Return this device's index along an axis, inside ``run``; 0 if the axis has size 1."""
        return jax.lax.axis_index(axis) if self.size(axis) > 1 else 0

    def size(self, axis: str) -> int:
        """Return the size of an axis; 1 if the mesh does not have it."""
        return self.mesh.shape.get(axis, 1)


def shard_over(mesh: Mesh | AbstractMesh, kv_heads: int) -> MeshSharding:
    """Return the sharding of a model with ``kv_heads`` key-value heads over a mesh.

    Raises:
      ValueError: if ``mesh`` is not a mesh, has axes other than ``data``, ``tensor`` and
        ``sequence``, or has no device of this process.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"mesh must be a jax.sharding.Mesh, such as from make_mesh, got {mesh!r:.80}"
        )
    return _shard_over(mesh, kv_heads)


@functools.lru_cache(maxsize=256)
def _shard_over(mesh: Mesh | AbstractMesh, kv_heads: int) -> MeshSharding:
    if isinstance(mesh, Mesh) and not mesh.local_devices:
        raise ValueError(
            f"the mesh has {mesh.size} devices, but none of process {jax.process_index()}: every "
            "process must have a device of the mesh"
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
