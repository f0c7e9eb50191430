"""The tree of prefixes: texts that were computed once, found again by requests that begin alike."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvjax.core.array_folder import PendingSave, read_folder, report_format_errors, save_folder
from kvjax.core.errors import CheckpointError
from kvjax.core.mesh_context import allow_host_to_device
from kvjax.operations.saving import fingerprint
from kvjax.policies.presets import PolicyChoice
from kvjax.prefixes.keys import Versions, named
from kvjax.prefixes.lease import Lease
from kvjax.prefixes.nodes import Key
from kvjax.prefixes.saved import KIND, from_folder, terms_of, to_folder
from kvjax.prefixes.stats import PrefixStats
from kvjax.prefixes.terms import in_bytes, terms_for
from kvjax.prefixes.texts import Texts
from kvjax.prefixes.tiers import without_the_gone
from kvjax.prefixes.turns import Turns


class Served(Protocol):
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
        lm: Served,
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
        self._versions = Versions()
        self.terms = terms_for(
            lm, policy, pages, memory, max_len, prefill_chunk, exact_prefix, checkpoint_every,
            rotary_len,
        )  # fmt: skip
        host, disk = in_bytes("host_memory", host_memory), in_bytes("disk_memory", disk_memory)
        self.texts = Texts(self.terms, (host, disk, folder))
        self.texts.clear()
        self._rows = self._hits = self._asked = self._saved = 0
        self.turns = Turns()

    @property
    def weights(self) -> Hashable:
        """Which weights the model has."""
        return self._named

    @weights.setter
    def weights(self, name: Hashable) -> None:
        self._named = named("weights", name)

    def clear(self) -> None:
        """Forget all texts.

        Raises:
          ValueError: if an earlier request has the pages.
        """
        with self.turns.taken(), self.texts.lock:
            self.texts.clear()

    @property
    def settings(self) -> dict[str, Any]:
        """Of ``generate``: with them a request is, without a tree, what it is with this one."""
        return {
            "cache": list(self.terms.policies), "max_len": self.terms.max_len,
            "rotary_len": self.terms.rotary_len, "prefill_chunk": self.terms.prefill_chunk,
        }  # fmt: skip

    @allow_host_to_device
    def save(self, path: str | Path, lm: Served, *, wait: bool = True) -> PendingSave:
        """Write what it keeps of these ``weights`` into a folder, for ``load``; as
        ``kvjax.save_cache`` does.

        Raises:
          ValueError: if an earlier request has the pages.
          CheckpointError: if something else stands there.
        """
        with self.turns.taken():  # nobody else changes them meanwhile
            self._check_model(lm)
            arrays, told = without_the_gone(lambda: to_folder(self.texts, self.weights))
        saving = save_folder(path, arrays, told | {"model": fingerprint(lm)})
        if wait:
            saving.wait()
        return saving

    @classmethod
    @allow_host_to_device
    def load(
        cls,
        path: str | Path,
        lm: Served,
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
            settings = terms_of(told)
        found = cls(
            lm, list(settings.pop("policies")), host_memory=host_memory, folder=folder,
            disk_memory=disk_memory, **settings,
        )  # fmt: skip
        with report_format_errors(path):
            from_folder(found.texts, arrays, told)
        found._check_model(lm)
        return found

    def of(self, tenant: Hashable) -> "Tenant":
        """The tree for somebody whose texts nobody else finds: as ``prefix_cache``.

        Raises:
          ValueError: if they are named by no text or whole number, nor a tuple of such.
        """
        return Tenant(self, named("tenant", tenant))

    def stats(self) -> PrefixStats:
        """What it has done, and has."""
        texts = self.texts
        with texts.lock:
            ends, taken, cached = texts.count()
            free = [len(counts.free) for counts in texts.pool.counts]
            held = [int((counts.refs > 0).sum()) for counts in texts.pool.counts]
            used = [n - kept for n, kept in zip(held, cached, strict=True)]
            return PrefixStats(
                self._rows, self._hits, self._asked, self._saved, ends, taken,
                tuple(free), tuple(used), tuple(cached), texts.tiers.dropped,
            )  # fmt: skip

    @allow_host_to_device
    def lend(
        self, lm: Served, prompts: Sequence[list[int]], *, new: int, samples: int = 1,
        tenant: Hashable = None,
    ) -> Lease:  # fmt: skip
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
        with self.turns.taken(), self.texts.lock:
            if self.texts.pool.lost:
                self.texts.clear()
            self._check_model(lm)
            for gone in self._versions.gone(self.weights):
                self.texts.forget_weights(gone)
            rows = len(prompts) if self.terms.exact_prefix else None
            key = Key(tenant, self.weights, rows)
            lease = self.turns.lease = Lease(self.texts, key, prompts, new, samples)
            self._rows += len(prompts)
            self._hits += int((lease.hits > 0).sum())
            self._asked += sum(map(len, prompts))
            self._saved += int(lease.hits.sum())
            return lease

    def _check_model(self, lm: Served) -> None:
        if lm.config != self.terms.config or lm.mesh != self.terms.mesh:
            raise ValueError("the prefix tree was made for another model, or for other devices")
        self._versions.check(self.weights, lm.params)


@dataclass(frozen=True)
class Tenant:
    """A tree, for one tenant."""

    tree: PrefixTree
    name: Hashable
