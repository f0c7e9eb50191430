"""What an engine does for one who waits for it, and steps it meanwhile."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Unpack

from kvjax.core.checks import whole_number
from kvjax.engine.handle import Handle, Piece
from kvjax.engine.request import Asking
from kvjax.generation.best_of import best_rows


class Runs(Protocol):
    """Requests that are submitted, and then waited for, by any number of threads.

    ``stepping``: what a step holds, so that no other is done meanwhile.
    """

    stepping: AbstractContextManager[Any]

    def submit(self, prompt: str | Sequence[int], **settings: Unpack[Asking]) -> Handle:
        """Ask for a text."""
        ...

    def step(self) -> bool:
        """Do the next piece of work of all."""
        ...

    def run(
        self, prompts: Sequence[str | Sequence[int]], **settings: Unpack[Asking]
    ) -> list[Handle]:
        """Submit requests with the same settings, each with a seed one higher than the one before,
        and a copy of the guide, and step until all have ended."""
        first, handles, guide = settings.get("seed", 0), [], settings.get("guide")
        if guide is not None and len(prompts) > 1 and not hasattr(guide, "copy"):
            raise ValueError(
                "a guide of several requests has copy(): each goes along one of its own"
            )
        for number, prompt in enumerate(prompts):
            settings["seed"] = first + number
            if guide is not None and len(prompts) > 1:
                settings["guide"] = guide.copy()  # type: ignore[attr-defined]
            handles.append(self.submit(prompt, **settings))
        while not all(handle.done for handle in handles):
            self.step()
        return handles

    def best_of(
        self, prompt: str | Sequence[int], samples: int, **settings: Unpack[Asking]
    ) -> list[Handle]:
        """Of so many samples of a prompt, each with a seed one higher than the one before, the
        ``n`` with the highest mean log-probability, by default one, the best one first; as
        ``best_of`` of ``generate``.

        Raises:
          ValueError: as of ``submit``; if there are fewer samples than are to be the best, or a
            search.
          NonFiniteError: if logits are not finite numbers.
        """
        n = whole_number("n", settings.pop("n", 1), 1)
        samples = whole_number("samples", samples, n)
        if settings.get("num_beams", 1) != 1:
            raise ValueError("best_of is of samples, and num_beams of a search: give one of them")
        if settings.get("logprobs") is None:
            settings["logprobs"] = 0
        handles = self.run([prompt] * samples, **settings)
        for handle in handles:
            if handle.error is not None:
                raise handle.error
        (rows,), _ = best_rows([handle.logprobs or [] for handle in handles], samples, n)
        return [handles[row] for row in rows.tolist()]

    def stream(self, handle: Handle) -> Iterator[Piece]:
        """A request's text as it comes, by steps that do the work of all. Who stops in the middle
        may go on later, or ``cancel`` it.

        Raises:
          NonFiniteError: if its logits are not finite numbers.
        """
        return handle.pieces(self.step, self.stepping)
