"""What all endpoints of a server have in common."""

import time
from dataclasses import dataclass, field
from typing import Any

from kvjax.engine.handle import Handle
from kvjax.engine.service import Service
from kvjax.generation.guides.grammars import Guides
from kvjax.serve.keys import Keys
from kvjax.serve.limits import Limits
from kvjax.serve.logprobs import TokenTexts
from kvjax.serve.metrics import Figures
from kvjax.serve.queue import Queue
from kvjax.serve.settings import Settings


@dataclass
class Shared:
    """``lm``, ``service``, ``settings``: what is served, by what, and how. ``created``: when,
    in seconds since 1970. ``draining``: whether it comes to its end; ``active``: requests that are
    answered; ``handles``: of these. The rest follows."""

    lm: Any
    service: Service
    settings: Settings
    figures: Figures = field(init=False)
    keys: Keys = field(init=False)
    queue: Queue = field(init=False)
    limits: Limits = field(init=False)
    texts: TokenTexts | None = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    active: int = 0
    handles: set[Handle] = field(default_factory=set)

    def __post_init__(self) -> None:
        engine = self.service.engine
        self.figures = Figures(engine)
        self.keys = Keys(self.settings.keys, self.settings.share_prefixes)
        places = self.settings.places
        self.queue, self.limits = Queue(places), Limits(self.lm, engine.pool_config, places)
        self.texts = None if self.lm.tokenizer is None else TokenTexts(self.lm.tokenizer)
        self._guides: Guides | None = None

    def guides(self) -> Guides:
        """Made when they are first asked for; twice, if two ask at once, which does no harm.

        Raises:
          ValueError: as of ``Guides``.
        """
        if self._guides is None:
            self._guides = Guides(self.lm)
        return self._guides

    def give_up(self) -> None:
        """Cancel all that goes on."""
        for handle in self.handles:
            self.service.cancel(handle)
