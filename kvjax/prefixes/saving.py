"""A tree's texts as arrays of a folder, and back."""

import json
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.core.errors import CheckpointError
from kvjax.core.pytree import deserialize_static, serialize_static
from kvjax.core.target import current_platform
from kvjax.core.typing import Array
from kvjax.prefixes.pool_config import PoolConfig
from kvjax.prefixes.radix import DEVICE, Entry, Namespace, Node, subtree
from kvjax.prefixes.sequences import CachedSequences

KIND = "a tree of prefixes"


def to_folder(
    sequences: CachedSequences, weights: Hashable
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What a tree keeps of such weights, as arrays, and what there is to tell of them.

    Raises:
      GoneError: if a file of it is not there any more.
    """
    groups = range(len(sequences.pool_config.groups))
    pages: list[list[tuple[Node, Entry]]] = [[] for _ in groups]
    states: list[tuple[Node, Entry]] = []
    roots = {key: root for key, root in sequences.radix.roots.items() if key.weights == weights}
    nodes = [node for root in roots.values() for node in subtree(root)]
    for node in nodes:
        for group, some in enumerate(node.pages):
            pages[group] += [(node, page) for page in some if page is not None]
        states += [] if node.checkpoint is None else [(node, node.checkpoint)]
    numbers = {id(node): n for n, node in enumerate(nodes)}
    place = {id(kept): n for some in (*pages, states) for n, (_, kept) in enumerate(some)}
    told = {
        "kind": KIND,
        "settings": _plain(sequences.pool_config),
        "weights": _words(weights),
        "roots": [[_words(tuple(key)), numbers[id(root)]] for key, root in roots.items()],
        "nodes": [
            {
                "parent": None if node.parent is None else numbers[id(node.parent)],
                "tokens": node.tokens,
                "used": node.last_used,
                "pages": [[page and place[id(page)] for page in some] for some in node.pages],
                "state": node.checkpoint and place[id(node.checkpoint)],
            }
            for node in nodes
        ],
        "forms": _forms(sequences),
    }
    arrays = {"nodes": np.array([len(nodes)])}  # a folder is of one array at least
    for group in groups:
        near = [page.page for _, page in pages[group] if page.tier == DEVICE]
        contents = dict(zip(near, sequences.pool.read(group, near), strict=True))
        some = [
            contents[page.page] if page.tier == DEVICE else sequences.tiers.read(node, page)
            for node, page in pages[group]
        ]
        arrays |= _stacked(f"pages {group}", some)
    return arrays | _stacked("states", [sequences.tiers.read(*each) for each in states]), told


def settings_of(told: dict[str, Any]) -> dict[str, Any]:
    """The settings of the tree that was written."""
    policies, *rest = deserialize_static(json.dumps(told["settings"]).encode())
    names = "max_len", "prefill_chunk", "exact_prefix", "checkpoint_every", "rotary_len"
    rest = [*rest, None][: len(names)]  # older files have no rotary_len
    return {"policies": policies, "weights": _whole(told["weights"])} | dict(
        zip(names, rest, strict=True)
    )


def from_folder(
    sequences: CachedSequences, arrays: dict[str, np.ndarray], told: dict[str, Any]
) -> None:
    """Fill a tree that is empty, on the host, as far as its limits go.

    Raises:
      CheckpointError: if a kind of device, or a mesh, keeps pages in another form.
    """
    if told["forms"] != _forms(sequences):
        raise CheckpointError(
            "the tree was saved by another kind of device, or mesh, which keeps pages in another "
            f"form: {str(told['forms'])[:100]}"
        )
    keys = {number: Namespace(*_whole(key)) for key, number in told["roots"]}
    made: list[Node] = []
    for number, each in enumerate(told["nodes"]):
        tokens, parent = tuple(each["tokens"]), each["parent"]
        node = Node(tokens, None if parent is None else made[parent], sequences.radix.shape)
        node.last_used = each["used"]
        made.append(node)
        if node.parent is None:
            sequences.radix.roots[keys[number]] = node
        else:
            node.parent.children[tokens] = node
        for group, some in enumerate(each["pages"]):
            for at, page in enumerate(some):
                if page is not None:
                    kept = node.pages[group][at] = Entry(
                        sequences.pool_config.groups[group].page_bytes
                    )
                    sequences.tiers.store_on_host(kept, _of(arrays, f"pages {group}", page))
        if each["state"] is not None:
            node.checkpoint = Entry(sequences.pool_config.checkpoint_bytes)
            sequences.tiers.store_on_host(node.checkpoint, _of(arrays, "states", each["state"]))
    sequences.radix.clock = max((node.last_used for node in made), default=0)
    sequences.tiers.enforce_limits()


def _plain(config: PoolConfig) -> Any:
    return json.loads(
        serialize_static(
            (
                config.policies,
                config.max_len,
                config.prefill_chunk,
                config.exact_prefix,
                config.checkpoint_every,
                config.rotary_len,
            )
        )
    )


def _words(name: Hashable) -> Any:
    return json.loads(serialize_static((name,)))


def _whole(words: Any) -> Any:
    (found,) = deserialize_static(json.dumps(words).encode())
    return found


def _forms(sequences: CachedSequences) -> list[Any]:
    """How a page's numbers, and a row's, are kept here."""
    leaves: list[Array] = jax.tree.leaves(sequences.pool_config.cache_shapes(1).layers)
    return [current_platform(), [[x.dtype.name, list(x.shape[1:])] for x in leaves]]


def _stacked(name: str, some: Sequence[Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
    return {f"{name} {number}": np.stack(x) for number, x in enumerate(zip(*some, strict=True))}


def _of(arrays: dict[str, np.ndarray], name: str, at: int) -> list[np.ndarray]:
    count = sum(key.startswith(f"{name} ") for key in arrays)
    # Their own: a part of a larger array would keep all of it.
    return [np.array(arrays[f"{name} {number}"][at]) for number in range(count)]
