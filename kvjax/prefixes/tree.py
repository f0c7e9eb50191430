"""``PrefixTree``: a prefix cache for ``generate``."""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from kvjax.core.array_folder import PendingSave, read_folder, report_format_errors, save_folder
from kvjax.core.mesh_context import allow_host_to_device
from kvjax.core.validation import CheckpointError
from kvjax.operations.saving import fingerprint
from kvjax.policies.model_config import CacheShape
from kvjax.policies.presets import PolicyChoice
from kvjax.prefixes._saving import KIND, from_folder, settings_of, to_folder
from kvjax.prefixes.lease import Lease, LeaseLock
from kvjax.prefixes.pool_config import in_bytes, make_pool_config
from kvjax.prefixes.radix import Namespace, checked_name
from kvjax.prefixes.sequences import CachedSequences
from kvjax.prefixes.tiers import retry_lost_entries


@dataclass(frozen=True)
class PrefixStats:
    """Statistics of a prefix tree.

    Attributes:
      prompts: number of prompts that were looked up.
      hits: number of prompts with a cached prefix.
      prompt_tokens: number of tokens of all prompts.
      cached_tokens: number of prompt tokens that did not have to be computed.
      sequences: number of cached sequences.
      bytes: bytes of cached data in the tiers ``"device"``, ``"host"`` and ``"disk"``.
      free_pages: number of free pages of each pool.
      used_pages: number of pages of each pool that running requests use and the tree does not keep.
      cached_pages: number of pages of each pool that the tree keeps.
      evicted: number of pages and checkpoints that were evicted so far.

    Example:
      ```python
      tree = kvjax.PrefixTree(lm, pages=16, max_len=512)
      stats = tree.stats()
      print(stats.hits, stats.cached_tokens, stats.bytes)
      ```
    """

    prompts: int
    hits: int
    prompt_tokens: int
    cached_tokens: int
    sequences: int
    bytes: dict[str, int]
    free_pages: tuple[int, ...]
    used_pages: tuple[int, ...]
    cached_pages: tuple[int, ...]
    evicted: int

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens that did not have to be computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class WeightVersions:
    """The parameters of each ``PrefixTree.weight_version``, as weak references."""

    def __init__(self) -> None:
        self._arrays: dict[Hashable, list[weakref.ref[jax.Array]]] = {}

    def check(self, weight_version: Hashable, params: PyTree) -> None:
        """Record the parameters of a version, or compare them with the recorded ones.

        Raises:
          ValueError: if the version was used with different parameters.
        """
        leaves = jax.tree.leaves(params)
        refs = self._arrays.setdefault(weight_version, [weakref.ref(x) for x in leaves])
        if len(refs) != len(leaves) or any(
            ref() is not x for ref, x in zip(refs, leaves, strict=True)
        ):
            raise ValueError(
                f"the prefix tree used weight_version={weight_version!r} with other parameters; "
                "set tree.weight_version to a new value whenever the model's parameters change"
            )

    def forget_deleted(self, weight_version: Hashable) -> list[Hashable]:
        """Remove versions whose arrays have been deleted, because no model can have these arrays
        again. The current version is never removed. Returns the removed versions."""
        deleted = [
            version
            for version, refs in self._arrays.items()
            if version != weight_version and any(ref() is None for ref in refs)
        ]
        for version in deleted:
            del self._arrays[version]
        return deleted


class ModelLike(Protocol):
    """The attributes that a tree needs from a model."""

    @property
    def config(self) -> CacheShape: ...
    @property
    def params(self) -> PyTree: ...
    @property
    def mesh(self) -> Mesh | None: ...


class PrefixTree:
    """A prefix cache. With ``generate(..., prefix_cache=tree)``, common prefixes of prompts are
    computed once.

    Cached sequences are stored in pages of one pool. A hit is the cached tokens with which a prompt
    begins. It is rounded down to a position where the tree has everything that the next token
    needs: full pages and, for quantized caches and windows, a checkpoint. A checkpoint is a copy of
    the window and of the tail (the newest tokens).

    With ``exact_prefix``, the logits of a request are bitwise the same as in ``generate(lm,
    prompts, **tree.settings)`` without a tree, on the same device. To achieve this, the tree keeps
    only whole prefill chunks, separately for each number of rows, and all rows of a request start
    from the same number of cached tokens. Without ``exact_prefix``, hits are longer, because each
    row has its own hit, hits may end inside a chunk, and generated tokens are cached too.

    Threads may share a tree. It serves one request at a time, and other calls of ``generate`` wait.
    An ``Engine`` serves many requests at the same time, and has its own prefix cache.

    Source: RadixAttention (Zheng et al., SGLang, arXiv:2312.07104) on pages (Kwon et al.,
    PagedAttention, arXiv:2309.06180).

    Args:
      lm: the model. A mesh may divide it along ``tensor`` only.
      policy: the policy, as for ``init_cache``. Every layer must have pages or a window, and at
        least one must have pages.
      pages: the number of pages of each pool. Give either this or ``memory``, or set the pages in
        the policy.
      memory: instead of ``pages``, the size of all pools together, such as ``2**31`` (bytes) or
        ``"2GiB"``.
      max_len: the maximum number of tokens per row, prompt and new tokens together; by default the
        model's number of positions.
      rotary_len: as for ``init_cache``.
      prefill_chunk: the number of prompt tokens that are computed together. With ``exact_prefix``,
        hits end at multiples of this number that are also ends of pages.
      exact_prefix: whether results must not depend on which sequences are cached, see above.
      checkpoint_every: the number of pages between checkpoints inside a long prompt, if the policy
        needs checkpoints. Further checkpoints are at positions where both a chunk and a page end:
        the last such position of the prompt, and the last one in the part that the prompt shares
        with a cached sequence.
      host_memory: host memory for swapped-out pages and for checkpoints, in bytes or as text.
      folder: a folder for pages and checkpoints that exceed ``host_memory``. Their files are
        deleted with the tree. By default nothing is stored on disk.
      disk_memory: the maximum size of the files in ``folder``, in bytes or as text.
      weight_version: the name of the version of the model's parameters: a string, an integer, or a
        tuple of these. Set ``tree.weight_version`` to a new value whenever the parameters change.
        Sequences of earlier versions then no longer match, and are removed when the parameters of
        their version are deleted.

    Raises:
      ValueError: if no layer is paged, a layer keeps whole sequences outside of pages, the policy
        moves layers while it runs, the mesh splits rows over devices, or the size of the pools is
        missing or given twice.

    Example:
      ```python
      tree = kvjax.PrefixTree(lm, pages=16, max_len=512)
      result = kvjax.generate(lm, "The json module", prefix_cache=tree, max_new_tokens=8)
      print(tree.stats().hit_rate)
      ```
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
        weight_version: Hashable = 0,
    ) -> None:
        self.weight_version = weight_version
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
        self._prompts = self._hits = self._prompt_tokens = self._cached_tokens = 0
        self.lease_lock = LeaseLock()

    @property
    def weight_version(self) -> Hashable:
        """The current version of the model's parameters."""
        return self._weight_version

    @weight_version.setter
    def weight_version(self, name: Hashable) -> None:
        self._weight_version = checked_name("weight_version", name)

    def clear(self) -> None:
        """Remove all sequences.

        Raises:
          ValueError: if an unfinished stream uses the pages.
        """
        with self.lease_lock.acquire(), self.sequences.lock:
            self.sequences.clear()

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments with which ``generate`` without a tree gives the same results as with this
        tree."""
        return {
            "cache": list(self.pool_config.policies),
            "max_len": self.pool_config.max_len,
            "rotary_len": self.pool_config.rotary_len,
            "prefill_chunk": self.pool_config.prefill_chunk,
        }

    @allow_host_to_device
    def save(self, path: str | Path, lm: ModelLike, *, wait: bool = True) -> PendingSave:
        """Write the sequences of the current ``weight_version`` into a folder, for ``load``.
        ``wait`` is as for ``kvjax.save_cache``.

        Raises:
          ValueError: if an unfinished stream uses the pages.
          CheckpointError: if the folder contains something else.
        """
        with self.lease_lock.acquire():  # no other thread may change the tree meanwhile
            self._check_model(lm)
            arrays, metadata = retry_lost_entries(
                lambda: to_folder(self.sequences, self.weight_version)
            )
        saving = save_folder(path, arrays, metadata | {"model": fingerprint(lm)})
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
        """Load a tree that ``save`` wrote. Its sequences are on the host at first. For the other
        arguments, see ``PrefixTree``.

        Raises:
          CheckpointError: if the folder contains no tree, the tree belongs to a different model or
            platform, or a file is damaged.
        """
        metadata, arrays = read_folder(path)
        if metadata.get("kind") != KIND:
            raise CheckpointError(f"{path}: holds {metadata.get('kind')}, not {KIND}")
        if metadata.get("model") != (model := fingerprint(lm)):
            raise CheckpointError(
                f"{path}: has sequences of the model {metadata.get('model')}, but this is {model}"
            )
        with report_format_errors(path):
            settings = settings_of(metadata)
        tree = cls(
            lm,
            list(settings.pop("policies")),
            host_memory=host_memory,
            folder=folder,
            disk_memory=disk_memory,
            **settings,
        )
        with report_format_errors(path):
            from_folder(tree.sequences, arrays, metadata)
        tree._check_model(lm)
        return tree

    def for_tenant(self, tenant: Hashable) -> "Tenant":
        """Return the tree for one tenant. Pass it as ``prefix_cache``. Tenants never match each
        other's sequences.

        Raises:
          ValueError: if ``tenant`` is not a string, an integer, or a tuple of these.
        """
        return Tenant(self, checked_name("tenant", tenant))

    def stats(self) -> PrefixStats:
        """Return statistics since the tree was created."""
        sequences = self.sequences
        with sequences.lock:
            count, nbytes, cached = sequences.usage()
            free = [len(allocator.free) for allocator in sequences.pool.allocators]
            taken = [int((allocator.refs > 0).sum()) for allocator in sequences.pool.allocators]
            return PrefixStats(
                prompts=self._prompts,
                hits=self._hits,
                prompt_tokens=self._prompt_tokens,
                cached_tokens=self._cached_tokens,
                sequences=count,
                bytes=nbytes,
                free_pages=tuple(free),
                used_pages=tuple(n - kept for n, kept in zip(taken, cached, strict=True)),
                cached_pages=tuple(cached),
                evicted=sequences.tiers.dropped,
            )

    @allow_host_to_device
    def lease(
        self,
        lm: ModelLike,
        prompts: Sequence[list[int]],
        *,
        new: int,
        samples: int = 1,
        tenant: Hashable = None,
    ) -> Lease:
        """Lease the tree's pages to one request.

        Args:
          lm: the model, with its current parameters.
          prompts: the token ids of each row.
          new: the maximum number of tokens that will be added to each row.
          samples: the number of continuations of each prompt.
          tenant: the owner of the sequences.

        Raises:
          ValueError: if the model is not the tree's, ``weight_version`` was used with different
            parameters, an unfinished stream uses the pages, or the pool has too few pages.
        """
        with self.lease_lock.acquire(), self.sequences.lock:
            if self.sequences.pool.lost:
                self.sequences.clear()
            self._check_model(lm)
            for version in self._versions.forget_deleted(self.weight_version):
                self.sequences.forget_weights(version)
            rows = len(prompts) if self.pool_config.exact_prefix else None
            namespace = Namespace(tenant, self.weight_version, rows)
            lease = Lease(self.sequences, namespace, prompts, new, samples)
            self.lease_lock.lease = lease
            self._prompts += len(prompts)
            self._hits += int((lease.hits > 0).sum())
            self._prompt_tokens += sum(map(len, prompts))
            self._cached_tokens += int(lease.hits.sum())
            return lease

    def _check_model(self, lm: ModelLike) -> None:
        if lm.config != self.pool_config.model_config or lm.mesh != self.pool_config.mesh:
            raise ValueError("the prefix tree was made for another model or other devices")
        self._versions.check(self.weight_version, lm.params)


@dataclass(frozen=True)
class Tenant:
    """A prefix tree for one tenant."""

    tree: PrefixTree
    name: Hashable
