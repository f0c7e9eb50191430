"""What an engine has done, as numbers."""

from dataclasses import dataclass


@dataclass
class EngineStats:
    preemptions: int = 0
    parked: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled: int = 0
    padded: int = 0
    decoded: int = 0
