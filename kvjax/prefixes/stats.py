"""What a tree has done, and has, as numbers."""

from dataclasses import dataclass


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
