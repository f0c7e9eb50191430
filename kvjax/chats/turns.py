"""A turn of a chat, and a chat's figures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """What was asked, and what was answered.

    ``user``, ``answer``: their texts, the answer as far as it came; ``tokens``: the answer's, as
    they were drawn; ``reason``: why it ended, as ``GenerationStats.stop_reasons``, ``"stopped"``
    where it was stopped half way or an error ended it; None while it runs.
    ``attempt``: how often it was answered before, by which its seed goes; ``first``: the first turn
    that the model saw with it, where older ones were dropped.
    """

    user: str
    answer: str = ""
    tokens: tuple[int, ...] = ()
    reason: str | None = None
    attempt: int = 0
    first: int = 0


@dataclass(frozen=True)
class ChatStats:
    """Figures of a chat, from its first turn on, those before it was saved among them.

    ``turns``: how many it has; ``dropped``: the oldest ones that the model sees no more.
    ``prefilled``: tokens that were read, of prompts; ``known``: tokens of prompts that were not, as
    the cache had them; ``reread``: of those read, the ones that had been read before, or written,
    and that the cache could not keep (it can't forget just what came after them).
    ``generated``: new tokens. ``prefill_seconds``, ``decode_seconds``, ``compile_seconds``: as of
    ``GenerationStats``.
    ``held``: tokens that the cache holds; ``room``: how many more the chat can have, None where it
    has no end. ``cache_bytes``: of the cache, by place.
    """

    turns: int
    dropped: int
    prefilled: int
    known: int
    reread: int
    generated: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    held: int
    room: int | None
    cache_bytes: dict[str, int]
