"""The tree of prefixes: texts that were computed once, found again by requests that begin alike."""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

from kvjax.core.array_folder import PendingSave, read_folder, report_format_errors, save_folder
from kvjax.core.errors import CheckpointError
from kvjax.core.mesh_context import allow_host_to_device
from kvjax.operations.saving import fingerprint
from kvjax.policies.presets import PolicyChoice
from kvjax.prefixes.lease import Lease, LeaseLock
from kvjax.prefixes.pool_config import in_bytes, make_pool_config
from kvjax.prefixes.radix import Namespace, checked_name
from kvjax.prefixes.saving import KIND, from_folder, settings_of, to_folder
from kvjax.prefixes.sequences import CachedSequences
from kvjax.prefixes.tiers import retry_lost_entries


@dataclass(frozen=True)
class PrefixStats:
    """What a tree has done, and has.

    ``rows``: prompts that were asked for; ``hits``: those of which it had something;
    ``prompt_tokens``, ``saved_tokens``: of them all, and those that were not computed again.
    ``texts``: ends of texts that it keeps. ``bytes``: of what it keeps, by tier: ``"device"``,
    ``"host"``, ``"disk"``. ``free``, ``used``, ``cached``: pages of each pool that nobody has, that
    rows alone have, and that the tree keeps. ``dropped``: pages and states that it let go.
    """

    rows: int
    hits: int
    prompt_tokens: int
    saved_tokens: int
    sequences: int
    bytes: dict[str, int]
    free: tuple[int, ...]
    used: tuple[int, ...]
    cached: tuple[int, ...]
    dropped: int

    @property
    def hit_rate(self) -> float:
        """Of the prompts' tokens, the share that was not computed again."""
        return self.saved_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class WeightVersions:
    """Which arrays each value of a tree's ``weights`` stands for, as long as these are there."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[weakref.ref[Any]]] = {}

    def check(self, weights: Hashable, params: Any) -> None:
        """Let a value stand for a model's parameters.

        Raises:
          ValueError: if it stands for others.
        """
        leaves = jax.tree.leaves(params)
        known = self._known.setdefault(weights, [weakref.ref(x) for x in leaves])
        if len(known) != len(leaves) or any(
            ref() is not x for ref, x in zip(known, leaves, strict=True)
        ):
            raise ValueError(
                f"the model's weights are other arrays than those that weights={weights!r} of the "
                "prefix tree stood for: set tree.weights to another value when they change"
            )

    def gone(self, weights: Hashable) -> list[Hashable]:
        """The values, but for the one that is in use, of whose arrays some are not there any more,
        so that no model can be told to have them; they are forgotten."""
        gone = [
            each
            for each, refs in self._known.items()
            if each != weights and any(ref() is None for ref in refs)
        ]
        for each in gone:
            del self._known[each]
        return gone


class ModelLike(Protocol):
    """What a tree asks of a model."""

    @property
    def config(self) -> Any: ...
    @property
    def params(self) -> Any: ...
    @property
    def mesh(self) -> Any: ...


class PrefixTree:
    """Texts that requests begin with, in pages of one pool: ``generate(..., prefix_cache=tree)``
    computes no prefix twice.

    A hit is rounded down to where a chunk of a prompt ended, and to where what the rule of sight
    asks for was kept (the raw tail, a window). With ``exact_prefix`` it then gives the logits of
    the same request without a tree (``generate(lm, prompts, **tree.settings)``) bit for bit, on the
    same device: what a chunk computes does not depend on where it began, so only such chunks are
    kept, of as many rows at once, and all rows of a request begin at their common hit. Without it
    hits are longer: of each row its own, and of texts that were generated.

    Threads may share a tree: it serves one request after the other, and those of ``generate`` wait
    for their turn; an ``Engine`` has many at once.

    Source: radix attention (Zheng et al., SGLang, arXiv:2312.07104), over pages (Kwon et al.,
    arXiv:2309.06180).

    Args:
      lm: the model; on its mesh, of ``tensor`` alone, if it has one.
      policy: as for ``init_cache``: layers in pages, or with windows; one at least in pages.
      pages: of each pool. ``memory``: in place of it, bytes, or ``"2GiB"``, that all may take. A
        policy that names its pages has neither.
      max_len: tokens a row, of prompt and new text; by default as many as the model has positions.
      rotary_len: as of ``init_cache``.
      prefill_chunk: tokens of a call of prompts; hits end at multiples of it and of a page.
      exact_prefix: see above.
      checkpoint_every: pages after which states are kept inside a long prompt, where the policy
        has any; they always are where prompts end, and where texts part.
      host_memory: bytes, or text, for pages that leave the device, and for states.
      folder: for what leaves the host; by default nothing is kept on disk. Files go with the tree.
      disk_memory: bytes, or text, of these.
      weights: which weights the model has, a number, a text, or a tuple of such: set
        ``tree.weights`` to another value whenever they change, and texts that were computed by
        others are not found; those of arrays that are gone are forgotten.

    Raises:
      ValueError: if no layer is in pages, a layer keeps a whole text elsewhere, the policy moves
        layers as it runs, rows are divided among devices, or a size is none or given twice.
    """

    @allow_host_to_device
    def __init__(
        self,
        lm: ModelLike,
        policy: PolicyChoice = "paged",
        *,
        pages: int | None = None,
        memory: int | str | None = None,
        max_len: int | None = None,
        rotary_len: int | None = None,
        prefill_chunk: int = 256,
        exact_prefix: bool = True,
        checkpoint_every: int = 16,
        host_memory: int | str = "1GiB",
        folder: str | Path | None = None,
        disk_memory: int | str = "16GiB",
        weights: Hashable = 0,
    ) -> None:
        self.weights = weights
        self._versions = WeightVersions()
        self.pool_config = make_pool_config(
            lm,
            policy,
            pages,
            memory,
            max_len,
            prefill_chunk,
            exact_prefix,
            checkpoint_every,
            rotary_len,
        )
        host, disk = in_bytes("host_memory", host_memory), in_bytes("disk_memory", disk_memory)
        self.sequences = CachedSequences(self.pool_config, (host, disk, folder))
        self.sequences.clear()
        self._rows = self._hits = self._asked = self._saved = 0
        self.lease_lock = LeaseLock()

    @property
    def weights(self) -> Hashable:
        """Which weights the model has."""
        return self._named

    @weights.setter
    def weights(self, name: Hashable) -> None:
        self._named = checked_name("weights", name)

    def clear(self) -> None:
        """Forget all texts.

        Raises:
          ValueError: if an earlier request has the pages.
        """
        with self.lease_lock.acquire(), self.sequences.lock:
            self.sequences.clear()

    @property
    def settings(self) -> dict[str, Any]:
        """Of ``generate``: with them a request is, without a tree, what it is with this one."""
        return {
            "cache": list(self.pool_config.policies),
            "max_len": self.pool_config.max_len,
            "rotary_len": self.pool_config.rotary_len,
            "prefill_chunk": self.pool_config.prefill_chunk,
        }

    @allow_host_to_device
    def save(self, path: str | Path, lm: ModelLike, *, wait: bool = True) -> PendingSave:
        """Write what it keeps of these ``weights`` into a folder, for ``load``; as
        ``kvjax.save_cache`` does.

        Raises:
          ValueError: if an earlier request has the pages.
          CheckpointError: if something else stands there.
        """
        with self.lease_lock.acquire():  # nobody else changes them meanwhile
            self._check_model(lm)
            arrays, told = retry_lost_entries(lambda: to_folder(self.sequences, self.weights))
        saving = save_folder(path, arrays, told | {"model": fingerprint(lm)})
        if wait:
            saving.wait()
        return saving

    @classmethod
    @allow_host_to_device
    def load(
        cls,
        path: str | Path,
        lm: ModelLike,
        *,
        host_memory: int | str = "1GiB",
        folder: str | Path | None = None,
        disk_memory: int | str = "16GiB",
    ) -> "PrefixTree":
        """The tree that ``save`` wrote, with its texts on the host; arguments as of ``PrefixTree``.

        Raises:
          CheckpointError: if it is none, was computed by another model, comes from another kind of
            device, or a file was cut or changed.
        """
        told, arrays = read_folder(path)
        if told.get("kind") != KIND:
            raise CheckpointError(f"{path}: holds {told.get('kind')}, and not {KIND}")
        if told.get("model") != (asked := fingerprint(lm)):
            raise CheckpointError(
                f"{path}: texts of the model {told.get('model')}, and this one is {asked}"
            )
        with report_format_errors(path):
            settings = settings_of(told)
        found = cls(
            lm,
            list(settings.pop("policies")),
            host_memory=host_memory,
            folder=folder,
            disk_memory=disk_memory,
            **settings,
        )
        with report_format_errors(path):
            from_folder(found.sequences, arrays, told)
        found._check_model(lm)
        return found

    def of(self, tenant: Hashable) -> "Tenant":
        """The tree for somebody whose texts nobody else finds: as ``prefix_cache``.

        Raises:
          ValueError: if they are named by no text or whole number, nor a tuple of such.
        """
        return Tenant(self, checked_name("tenant", tenant))

    def stats(self) -> PrefixStats:
        """What it has done, and has."""
        sequences = self.sequences
        with sequences.lock:
            ends, nbytes, cached = sequences.usage()
            free = [len(allocator.free) for allocator in sequences.pool.allocators]
            held = [int((allocator.refs > 0).sum()) for allocator in sequences.pool.allocators]
            used = [n - kept for n, kept in zip(held, cached, strict=True)]
            return PrefixStats(
                self._rows,
                self._hits,
                self._asked,
                self._saved,
                ends,
                nbytes,
                tuple(free),
                tuple(used),
                tuple(cached),
                sequences.tiers.dropped,
            )

    @allow_host_to_device
    def lend(
        self,
        lm: ModelLike,
        prompts: Sequence[list[int]],
        *,
        new: int,
        samples: int = 1,
        tenant: Hashable = None,
    ) -> Lease:
        """The pages for a request, with what is known of its prompts.

        Args:
          lm: the model, as it is now.
          prompts: token ids, a row.
          new: tokens that may be added to each.
          samples: continuations of each prompt.
          tenant: whose texts they are.

        Raises:
          ValueError: if the model is another one, or its weights are others than those that
            ``weights`` stood for; if an earlier request has the pages still, or there are too few.
        """
        with self.lease_lock.acquire(), self.sequences.lock:
            if self.sequences.pool.lost:
                self.sequences.clear()
            self._check_model(lm)
            for gone in self._versions.gone(self.weights):
                self.sequences.forget_weights(gone)
            rows = len(prompts) if self.pool_config.exact_prefix else None
            key = Namespace(tenant, self.weights, rows)
            lease = self.lease_lock.lease = Lease(self.sequences, key, prompts, new, samples)
            self._rows += len(prompts)
            self._hits += int((lease.hits > 0).sum())
            self._asked += sum(map(len, prompts))
            self._saved += int(lease.hits.sum())
            return lease

    def _check_model(self, lm: ModelLike) -> None:
        if lm.config != self.pool_config.model_config or lm.mesh != self.pool_config.mesh:
            raise ValueError("the prefix tree was made for another model, or for other devices")
        self._versions.check(self.weights, lm.params)


@dataclass(frozen=True)
class Tenant:
    """A tree, for one tenant."""

    tree: PrefixTree
    name: Hashable
