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
from kvjax.prefixes.nodes import DEVICE, Kept, Key, Node, below
from kvjax.prefixes.terms import Terms
from kvjax.prefixes.texts import Texts

KIND = "a tree of prefixes"


def to_folder(texts: Texts, weights: Hashable) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What a tree keeps of such weights, as arrays, and what there is to tell of them.

    Raises:
      GoneError: if a file of it is not there any more.
    """
    kinds = range(len(texts.terms.kinds))
    pages: list[list[tuple[Node, Kept]]] = [[] for _ in kinds]
    states: list[tuple[Node, Kept]] = []
    roots = {key: root for key, root in texts.nodes.roots.items() if key.weights == weights}
    nodes = [node for root in roots.values() for node in below(root)]
    for node in nodes:
        for kind, some in enumerate(node.pages):
            pages[kind] += [(node, page) for page in some if page is not None]
        states += [] if node.state is None else [(node, node.state)]
    numbers = {id(node): n for n, node in enumerate(nodes)}
    place = {id(kept): n for some in (*pages, states) for n, (_, kept) in enumerate(some)}
    told = {
        "kind": KIND, "settings": _plain(texts.terms), "weights": _words(weights),
        "roots": [[_words(tuple(key)), numbers[id(root)]] for key, root in roots.items()],
        "nodes": [
            {
                "parent": None if node.parent is None else numbers[id(node.parent)],
                "tokens": node.tokens, "used": node.used,
                "pages": [[page and place[id(page)] for page in some] for some in node.pages],
                "state": node.state and place[id(node.state)],
            }
            for node in nodes
        ],
        "forms": _forms(texts),
    }  # fmt: skip
    arrays = {"nodes": np.array([len(nodes)])}  # a folder is of one array at least
    for kind in kinds:
        near = [page.number for _, page in pages[kind] if page.tier == DEVICE]
        contents = dict(zip(near, texts.pool.contents(kind, near), strict=True))
        some = [
            contents[page.number] if page.tier == DEVICE else texts.tiers.read(node, page)
            for node, page in pages[kind]
        ]
        arrays |= _stacked(f"pages {kind}", some)
    return arrays | _stacked("states", [texts.tiers.read(*each) for each in states]), told


def terms_of(told: dict[str, Any]) -> dict[str, Any]:
    """The settings of the tree that was written."""
    policies, *rest = deserialize_static(json.dumps(told["settings"]).encode())
    names = "max_len", "prefill_chunk", "exact_prefix", "checkpoint_every", "rotary_len"
    rest = [*rest, None][: len(names)]  # older files have no rotary_len
    return {"policies": policies, "weights": _whole(told["weights"])} | dict(
        zip(names, rest, strict=True)
    )


def from_folder(texts: Texts, arrays: dict[str, np.ndarray], told: dict[str, Any]) -> None:
    """Fill a tree that is empty, on the host, as far as its limits go.

    Raises:
      CheckpointError: if a kind of device, or a mesh, keeps pages in another form.
    """
    if told["forms"] != _forms(texts):
        raise CheckpointError(
            "the tree was saved by another kind of device, or mesh, which keeps pages in another "
            f"form: {str(told['forms'])[:100]}"
        )
    keys = {number: Key(*_whole(key)) for key, number in told["roots"]}
    made: list[Node] = []
    for number, each in enumerate(told["nodes"]):
        tokens, parent = tuple(each["tokens"]), each["parent"]
        node = Node(tokens, None if parent is None else made[parent], texts.nodes.shape)
        node.used = each["used"]
        made.append(node)
        if node.parent is None:
            texts.nodes.roots[keys[number]] = node
        else:
            node.parent.children[tokens] = node
        for kind, some in enumerate(each["pages"]):
            for at, page in enumerate(some):
                if page is not None:
                    kept = node.pages[kind][at] = Kept(texts.terms.kinds[kind].page_bytes)
                    texts.tiers.rest(kept, _of(arrays, f"pages {kind}", page))
        if each["state"] is not None:
            node.state = Kept(texts.terms.state_bytes)
            texts.tiers.rest(node.state, _of(arrays, "states", each["state"]))
    texts.nodes.clock = max((node.used for node in made), default=0)
    texts.tiers.keep_limits()


def _plain(terms: Terms) -> Any:
    return json.loads(
        serialize_static(
            (
                terms.policies, terms.max_len, terms.prefill_chunk, terms.exact_prefix,
                terms.checkpoint_every, terms.rotary_len,
            )
        )
    )  # fmt: skip


def _words(name: Hashable) -> Any:
    return json.loads(serialize_static((name,)))


def _whole(words: Any) -> Any:
    (found,) = deserialize_static(json.dumps(words).encode())
    return found


def _forms(texts: Texts) -> list[Any]:
    """How a page's numbers, and a row's, are kept here."""
    leaves: list[Array] = jax.tree.leaves(texts.terms.shapes(1).layers)
    return [current_platform(), [[x.dtype.name, list(x.shape[1:])] for x in leaves]]


def _stacked(name: str, some: Sequence[Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
    return {f"{name} {number}": np.stack(x) for number, x in enumerate(zip(*some, strict=True))}


def _of(arrays: dict[str, np.ndarray], name: str, at: int) -> list[np.ndarray]:
    count = sum(key.startswith(f"{name} ") for key in arrays)
    # Their own: a part of a larger array would keep all of it.
    return [np.array(arrays[f"{name} {number}"][at]) for number in range(count)]
