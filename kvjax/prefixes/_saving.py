"""Saving a prefix tree to a folder, as arrays and JSON, and loading it."""

import json
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.core.pytree import deserialize_static, serialize_static
from kvjax.core.target import current_platform
from kvjax.core.typing import Array, Json
from kvjax.core.validation import CheckpointError
from kvjax.prefixes.pool_config import PoolConfig
from kvjax.prefixes.radix import DEVICE, Entry, Namespace, Node, subtree
from kvjax.prefixes.sequences import CachedSequences

KIND = "a tree of prefixes"
"""The kind of data in a folder. Files of earlier versions have the same value."""


def to_folder(
    sequences: CachedSequences, weight_version: Hashable
) -> tuple[dict[str, np.ndarray], Json]:
    """Convert the sequences of one version of the weights to arrays and metadata.

    Raises:
      EntryLostError: if a file of the disk tier is missing or damaged.
    """
    groups = range(len(sequences.pool_config.groups))
    pages: list[list[tuple[Node, Entry]]] = [[] for _ in groups]
    states: list[tuple[Node, Entry]] = []
    roots = {
        name: root
        for name, root in sequences.radix.roots.items()
        if name.weight_version == weight_version
    }
    nodes = [node for root in roots.values() for node in subtree(root)]
    for node in nodes:
        for group, entries in enumerate(node.pages):
            pages[group] += [(node, entry) for entry in entries if entry is not None]
        if node.checkpoint is not None:
            states.append((node, node.checkpoint))
    node_index = {id(node): n for n, node in enumerate(nodes)}
    index = {id(entry): n for items in (*pages, states) for n, (_, entry) in enumerate(items)}
    metadata = {
        "kind": KIND,
        "settings": _settings_json(sequences.pool_config),
        "weight_version": _name_json(weight_version),
        "roots": [[_name_json(tuple(name)), node_index[id(root)]] for name, root in roots.items()],
        "nodes": [
            {
                "parent": None if node.parent is None else node_index[id(node.parent)],
                "tokens": node.tokens,
                "used": node.last_used,
                "pages": [[page and index[id(page)] for page in pages] for pages in node.pages],
                "state": node.checkpoint and index[id(node.checkpoint)],
            }
            for node in nodes
        ],
        "forms": _formats(sequences),
    }
    arrays = {"nodes": np.array([len(nodes)])}  # a folder needs at least one array
    for group in groups:
        on_device = [entry.page for _, entry in pages[group] if entry.tier == DEVICE]
        contents = dict(zip(on_device, sequences.pool.read(group, on_device), strict=True))
        data = [
            contents[entry.page] if entry.tier == DEVICE else sequences.tiers.read(node, entry)
            for node, entry in pages[group]
        ]
        arrays |= _stack(f"pages {group}", data)
    data = [sequences.tiers.read(node, entry) for node, entry in states]
    return arrays | _stack("states", data), metadata


def settings_of(metadata: Json) -> dict[str, Any]:
    """Return the settings of a saved tree, by the names of the arguments of ``PrefixTree``."""
    policies, *values = deserialize_static(json.dumps(metadata["settings"]).encode())
    names = "max_len", "prefill_chunk", "exact_prefix", "checkpoint_every", "rotary_len"
    values = [*values, None][: len(names)]  # older files have no rotary_len
    settings = {"policies": policies, "weight_version": _name(metadata["weight_version"])}
    return settings | dict(zip(names, values, strict=True))


def from_folder(sequences: CachedSequences, arrays: dict[str, np.ndarray], metadata: Json) -> None:
    """Fill an empty tree with the data of a saved tree, on the host and on disk, within their
    limits.

    Raises:
      CheckpointError: if this platform or mesh stores pages in a different format.
    """
    if metadata["forms"] != _formats(sequences):
        raise CheckpointError(
            "the tree was saved on another platform or mesh, which stores pages in another "
            f"format: {str(metadata['forms'])[:100]}"
        )
    names = {number: Namespace(*_name(name)) for name, number in metadata["roots"]}
    config, nodes = sequences.pool_config, []
    for number, saved in enumerate(metadata["nodes"]):
        tokens, parent = tuple(saved["tokens"]), saved["parent"]
        node = Node(tokens, None if parent is None else nodes[parent], sequences.radix.shape)
        node.last_used = saved["used"]
        nodes.append(node)
        if node.parent is None:
            sequences.radix.roots[names[number]] = node
        else:
            node.parent.children[tokens] = node
        for group, pages in enumerate(saved["pages"]):
            for place, page in enumerate(pages):
                if page is not None:
                    entry = node.pages[group][place] = Entry(config.groups[group].page_bytes)
                    sequences.tiers.store_on_host(entry, _slice(arrays, f"pages {group}", page))
        if saved["state"] is not None:
            node.checkpoint = Entry(config.checkpoint_bytes)
            state = _slice(arrays, "states", saved["state"])
            sequences.tiers.store_on_host(node.checkpoint, state)
    sequences.radix.clock = max((node.last_used for node in nodes), default=0)
    sequences.tiers.enforce_limits()


def _settings_json(config: PoolConfig) -> list[object]:
    settings = (
        config.policies,
        config.max_len,
        config.prefill_chunk,
        config.exact_prefix,
        config.checkpoint_every,
        config.rotary_len,
    )
    return json.loads(serialize_static(settings))


def _name_json(name: Hashable) -> list[object]:
    return json.loads(serialize_static((name,)))


def _name(saved: list[object]) -> Any:
    (name,) = deserialize_static(json.dumps(saved).encode())
    return name


def _formats(sequences: CachedSequences) -> list[object]:
    """Return the storage formats of pages and rows: the platform, dtypes and shapes."""
    leaves: list[Array] = jax.tree.leaves(sequences.pool_config.cache_shapes(1).layers)
    return [current_platform(), [[x.dtype.name, list(x.shape[1:])] for x in leaves]]


def _stack(name: str, data: Sequence[Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
    return {f"{name} {number}": np.stack(x) for number, x in enumerate(zip(*data, strict=True))}


def _slice(arrays: dict[str, np.ndarray], name: str, index: int) -> list[np.ndarray]:
    count = sum(key.startswith(f"{name} ") for key in arrays)
    # Make copies, because a view would keep the whole array in memory.
    return [np.array(arrays[f"{name} {number}"][index]) for number in range(count)]
