"""Among whose texts a prompt is looked for: names, and which weights each stands for."""

import operator
import weakref
from collections.abc import Hashable
from typing import Any

import jax


def named(what: str, name: Any) -> Hashable:
    """A name for a tenant, or for weights: no two that differ are equal, as 1 and True are.

    Raises:
      ValueError: if it is no text, whole number or None, nor a tuple of such.
    """
    if name is None or isinstance(name, str):
        return name
    if isinstance(name, tuple):
        return tuple(named(what, each) for each in name)
    try:
        if not isinstance(name, bool):
            return operator.index(name)
    except TypeError:
        pass
    raise ValueError(f"{what} is {name!r}: name it by a text, a whole number, or a tuple of such")


class Versions:
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
