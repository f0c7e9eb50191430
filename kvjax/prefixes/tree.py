"""The tree of prefixes: texts that were computed once, found again by requests that begin alike."""

import gc
import math
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax

from kvjax.cache.creation import new_layer
from kvjax.cache.state import KVCache
from kvjax.core.checks import whole_number, whole_or_none
from kvjax.core.sizes import parse_bytes
from kvjax.core.trees import tree_bytes
from kvjax.layouts import paged
from kvjax.memory.sizes import abstract_cache
from kvjax.policies.model_config import decoder_config
from kvjax.policies.presets import PolicyChoice, budget_of, per_layer
from kvjax.prefixes.checkpoints import own, state_bytes
from kvjax.prefixes.kinds import Kind
from kvjax.prefixes.lease import Lease
from kvjax.prefixes.nodes import DEVICE, DISK, HOST, Kept, Node, Nodes
from kvjax.prefixes.pool import Pool
from kvjax.prefixes.tiers import Tiers


class Served(Protocol):
    """What a tree asks of a model."""

    @property
    def config(self) -> Any: ...
    @property
    def params(self) -> Any: ...
    @property
    def mesh(self) -> Any: ...


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
    texts: int
    bytes: dict[str, int]
    free: tuple[int, ...]
    used: tuple[int, ...]
    cached: tuple[int, ...]
    dropped: int

    @property
    def hit_rate(self) -> float:
        """Of the prompts' tokens, the share that was not computed again."""
        return self.saved_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PrefixTree:
    """Texts that requests begin with, in pages of one pool: ``generate(..., prefix_cache=tree)``
    computes no prefix twice.

    A hit is rounded down to where a chunk of a prompt ended, and to where what the rule of sight
    asks for was kept (the raw tail, a window). With ``exact_prefix`` it then gives the logits of
    the same request without a tree (``generate(lm, prompts, **tree.settings)``) bit for bit, on the
    same device: what a chunk computes does not depend on where it began, so only such chunks are
    kept, of as many rows at once, and all rows of a request begin at their common hit. Without it
    hits are longer: of each row its own, and of texts that were generated.

    Source: radix attention (Zheng et al., SGLang, arXiv:2312.07104), over pages (Kwon et al.,
    arXiv:2309.06180).

    Args:
      lm: the model; on its mesh, of ``tensor`` alone, if it has one.
      policy: as for ``init_cache``: layers in pages, or with windows; one at least in pages.
      pages: of each pool. ``memory``: in place of it, bytes, or ``"2GiB"``, that all may take.
      max_len: tokens a row, of prompt and new text; by default as many as the model has positions.
      prefill_chunk: tokens of a call of prompts; hits end at multiples of it and of a page.
      exact_prefix: see above.
      checkpoint_every: pages after which states are kept inside a long prompt, where the policy
        has any; they always are where prompts end, and where texts part.
      host_memory: bytes, or text, for pages that leave the device, and for states.
      folder: for what leaves the host; by default nothing is kept on disk. Files go with the tree.
      disk_memory: bytes, or text, of these.
      weights: which weights the model has, anything hashable: set ``tree.weights`` to another
        value whenever they change, and texts that were computed by others are not found.

    Raises:
      ValueError: if no layer is in pages, a layer keeps a whole text elsewhere, the policy moves
        layers as it runs, rows are divided among devices, or a size is none.
    """

    def __init__(
        self,
        lm: Served,
        policy: PolicyChoice = "paged",
        *,
        pages: int | None = None,
        memory: int | str | None = None,
        max_len: int | None = None,
        prefill_chunk: int = 256,
        exact_prefix: bool = True,
        checkpoint_every: int = 16,
        host_memory: int | str = "1GiB",
        folder: str | Path | None = None,
        disk_memory: int | str = "16GiB",
        weights: Hashable = 0,
    ) -> None:
        self._config, self._mesh = lm.config, lm.mesh
        self.prefill_chunk = whole_number("prefill_chunk", prefill_chunk, 1)
        self.checkpoint_every = whole_number("checkpoint_every", checkpoint_every, 1)
        self.exact_prefix, self.weights = exact_prefix, weights
        self._weights: dict[Hashable, list[weakref.ref[Any]]] = {}
        most = whole_or_none("max_len", max_len, 1)
        most = getattr(decoder_config(lm.config), "position_limit", None) if most is None else most
        if most is None:
            raise ValueError("this model's positions have no end: give max_len=")
        self.max_len: int = most
        if (pages is None) == (memory is None):
            raise ValueError("give pages=, or memory= in bytes")
        self.policies = _checked(policy, lm.config)
        self._shapes: dict[int, KVCache] = {}
        if memory is not None:
            whole = self._shapes_of(_with_pages(self.policies, 1), 1)
            pages = _in_bytes("memory", memory) // sum(kind.page_bytes for kind in _kinds(whole))
        self.policies = _with_pages(self.policies, whole_number("pages", pages, 1))
        whole = self.shapes(1)
        if whole.spread is not None and whole.spread.rows > 1:
            raise ValueError(
                "rows are divided among devices, each with a pool of its own: a prefix tree goes "
                "with a mesh of tensor alone"
            )
        self.kinds = _kinds(whole)
        self.unit = math.lcm(*(kind.page for kind in self.kinds))
        self.grid = math.lcm(self.unit, self.prefill_chunk) if exact_prefix else self.unit
        rows = tree_bytes([own(held) for held in whole.layers])
        self.stateful = bool(rows) or any(kind.moves for kind in self.kinds)
        self.state_bytes = state_bytes(whole, self.kinds)
        self._limits = (
            _in_bytes("host_memory", host_memory), _in_bytes("disk_memory", disk_memory), folder,
        )  # fmt: skip
        self._rows = self._hits = self._asked = self._saved = 0
        self._lease: Lease | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all texts."""
        whole = self.shapes(1)
        layers = [new_layer(x.policy, 1, x.kv_heads, x.head_dim, x.window) for x in whole.layers]
        self.pool = Pool(self.kinds, layers)
        shape = [self.unit // kind.page for kind in self.kinds]
        self.nodes = Nodes(self.unit, shape)
        self.tiers = Tiers(self.nodes, self.pool, *self._limits)

    @property
    def settings(self) -> dict[str, Any]:
        """Of ``generate``: with them a request is, without a tree, what it is with this one."""
        return {
            "cache": list(self.policies), "max_len": self.max_len,
            "prefill_chunk": self.prefill_chunk,
        }  # fmt: skip

    def of(self, tenant: Hashable) -> "Tenant":
        """The tree for somebody whose texts nobody else finds: as ``prefix_cache``."""
        return Tenant(self, tenant)

    def stats(self) -> PrefixStats:
        """What it has done, and has."""
        cached = [0] * len(self.kinds)
        bytes_of, texts = {DEVICE: 0, HOST: 0, DISK: 0}, 0
        for node in self.nodes:
            texts += node.parent is not None and not node.children
            for tier in bytes_of:
                bytes_of[tier] += sum(kept.nbytes for kept in node.kept(tier))
            for kind, pages in enumerate(node.pages):
                cached[kind] += sum(page is not None and page.tier == DEVICE for page in pages)
        free = [len(counts.free) for counts in self.pool.counts]
        held = [int((counts.refs > 0).sum()) for counts in self.pool.counts]
        used = [n - kept for n, kept in zip(held, cached, strict=True)]
        return PrefixStats(
            self._rows, self._hits, self._asked, self._saved, texts, bytes_of,
            tuple(free), tuple(used), tuple(cached), self.tiers.dropped,
        )  # fmt: skip

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
        if self._lease is not None:
            gc.collect()  # a stream that nobody has any more is part of a circle
        if self._lease is not None:
            raise ValueError(
                "the prefix tree's pages are with a stream that has not ended: iterate it to its "
                "end, or close it"
            )
        if self.pool.lost:
            self.clear()
        self._check_model(lm)
        rows = len(prompts) if self.exact_prefix else None
        key = tenant, self.weights, rows
        lease = Lease(self, key, prompts, new, samples)
        self._lease = lease
        self._rows += len(prompts)
        self._hits += int((lease.hits > 0).sum())
        self._asked += sum(map(len, prompts))
        self._saved += int(lease.hits.sum())
        return lease

    def returned(self) -> None:
        """The pages are back: a lease says it when it settles."""
        self._lease = None

    def shapes(self, rows: int) -> KVCache:
        """The cache of so many rows, as shapes."""
        if rows not in self._shapes:
            self._shapes[rows] = self._shapes_of(self.policies, rows)
        return self._shapes[rows]

    def page(self, path: Sequence[Node], kind: int, page: int) -> Kept:
        """A page of a text that is known to be there."""
        found = self._page(path, kind, page)
        assert found is not None
        return found

    def can_go_on(self, path: Sequence[Node], units: int) -> bool:
        """Whether a text can go on behind so many of the units that it has in the tree."""
        tokens = units * self.unit
        if tokens % self.grid or (self.stateful and path[units - 1].state is None):
            return False
        return all(
            self._page(path, number, page) is not None
            for number, kind in enumerate(self.kinds)
            for page in kind.needed(tokens)[0]
        )

    def state(self, path: Sequence[Node]) -> Any:
        """What rows have beside pages at the end of a path, None where there is nothing."""
        kept = path[-1].state if path else None
        return None if kept is None else self.tiers.read(kept)

    def _page(self, path: Sequence[Node], kind: int, page: int) -> Kept | None:
        each = self.nodes.shape[kind]
        return path[page // each].pages[kind][page % each]

    def _shapes_of(self, policies: Sequence[Any], rows: int) -> KVCache:
        return abstract_cache(
            self._config, list(policies), batch=rows, max_len=self.max_len, mesh=self._mesh
        )

    def _check_model(self, lm: Served) -> None:
        if lm.config != self._config or lm.mesh != self._mesh:
            raise ValueError("the prefix tree was made for another model, or for other devices")
        leaves = jax.tree.leaves(lm.params)
        known = self._weights.setdefault(self.weights, [weakref.ref(x) for x in leaves])
        if any(ref() is not x for ref, x in zip(known, leaves, strict=True)):
            raise ValueError(
                f"the model's weights are other arrays than those that weights={self.weights!r} of "
                "the prefix tree stood for: set tree.weights to another value when they change"
            )


@dataclass(frozen=True)
class Tenant:
    """A tree, for one tenant."""

    tree: PrefixTree
    name: Hashable


def _in_bytes(name: str, size: int | str) -> int:
    return parse_bytes(size) if isinstance(size, str) else whole_number(name, size, 0)


def _checked(choice: PolicyChoice, config: Any) -> tuple[Any, ...]:
    """The policies of all layers."""
    policies = per_layer(choice, config)
    if budget_of(choice) is not None:
        raise ValueError(
            "policy('auto') moves layers as it runs: give a prefix tree layers in pages, whose old "
            "pages go to the host by themselves"
        )
    if not any(paged(each.layout) for each in policies):
        raise ValueError(
            "a prefix tree keeps pages: give it a policy with layers in pages, such as 'paged'"
        )
    return policies


def _with_pages(policies: Sequence[Any], pages: int) -> tuple[Any, ...]:
    """With pools of so many pages, where nothing else was said."""
    found = []
    for each in policies:
        layout = paged(each.layout)
        if layout is not None and layout.pages is None:
            each = replace(each, layout=replace(layout, pages=pages))
        found.append(each)
    return tuple(found)


def _kinds(cache: KVCache) -> tuple[Kind, ...]:
    """The kinds of layers of a cache, as shapes.

    Raises:
      ValueError: if a layer keeps a whole text outside of pages.
    """
    for number, held in enumerate(cache.layers):
        if held.policy.paging is None and held.policy.layout.window is None:
            raise ValueError(
                f"layer {number} keeps whole texts outside of pages, {held.policy.layout}: a "
                "prefix tree can share pages, and windows"
            )
    found = []
    for paging in cache.pagings:
        entries = tuple(n for n, x in enumerate(cache.layers) if x.policy.paging == paging)
        bodies = [(cache.layers[n].keys, cache.layers[n].values) for n in entries]
        found.append(Kind(paging, entries, tree_bytes(bodies) // (paging.layout.pool or 1)))
    return tuple(found)
