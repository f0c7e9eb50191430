"""What the model is to see of a conversation, and where that is too long for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvjax.chats.known import Known
from kvjax.chats.texts import Rendering, messages_of
from kvjax.chats.turns import Turn
from kvjax.policies.model_config import positions_needed

WHEN_FULL = ("stop", "drop")


@dataclass(frozen=True)
class Plan:
    """A conversation up to where an answer begins: its ``text``, its tokens ``ids``, and which turn
    is the ``first`` in it."""

    text: str
    ids: list[int]
    first: int


def planned(
    rendering: Rendering, known: Known, system: str | None, turns: Sequence[Turn], user: str,
    *, most: int | None, new: int, drop: bool,
) -> Plan:  # fmt: skip
    """What is to be read for an answer to ``user`` behind ``turns``.

    ``most``: tokens that there is room for; ``new``: those that the answer may have. Where ``drop``
    lets old turns go, they do when that, or a quarter of the room, is not left, and then until half
    of it is: what stands behind them must be read again, which should be seldom.

    Raises:
      ValueError: if there is no room for an answer.
    """

    def plan(first: int) -> Plan:
        text = rendering.text(messages_of(system, turns[first:], user))
        return Plan(text, known.tokens(text, rendering.encode), first)

    found = plan(turns[-1].first if turns else 0)
    if not found.ids:
        raise ValueError("the text is empty: there is no token to answer to")
    if most is None:
        return found
    if positions_needed(len(found.ids), min(new, most // 4) if drop else 1) <= most:
        return found
    while drop and found.first < len(turns) and len(found.ids) > most // 2:
        found = plan(found.first + 1)
    if len(found.ids) <= most:
        return found
    full = f"the chat comes to {len(found.ids)} tokens with this text, and has room for {most}: "
    if drop:
        raise ValueError(full + "all older turns were left out already")
    raise ValueError(full + "take turns back, or let the oldest ones go (on_full='drop')")
