"""Programs in flight, how their outputs reach the requests, and an engine's counters."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import jax

from kvjax.core.transfer import fetch
from kvjax.core.validation import NonFiniteError
from kvjax.engine.beams import BeamSearchState
from kvjax.engine.handle import Handle
from kvjax.engine.programs import ProgramOutput
from kvjax.sampling.scores import token_scores


@dataclass
class Counters:
    """What an engine has done since it was created.

    Args:
      steps: calls of ``Engine.step``.
      requests: requests that were admitted to a row.
      prompt_tokens: prompt tokens of these requests.
      cached_tokens: prompt tokens whose keys and values came from the prefix cache.
      prefill_tokens: prompt tokens that were computed.
      padding_tokens: padding that was computed with them.
      new_tokens: generated tokens, including any after a stop string.
      preemptions: how often a running request lost its row and pages.
      swapped: preemptions that moved the request's state to the host; the others are recomputed.
      drafted_tokens: tokens that were drafted and verified.
      accepted_tokens: drafted tokens that the model accepted. Tokens whose verification was still
        in flight when their request was preempted are not counted.
      host_seconds: time in ``Engine.step`` without ``waiting_seconds``.
      waiting_seconds: time in which ``Engine.step`` waited for the device.
    """

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    padding_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    swapped: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    host_seconds: float = 0.0
    waiting_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The counters by name."""
        return {field.name: getattr(self, field.name) for field in fields(Counters)}


@dataclass
class EngineStats(Counters):
    """``Counters``, and what the engine currently uses.

    Args:
      rows: rows of the cache.
      running: requests that have a row.
      waiting: requests without a row.
      pages: pages of each pool.
      free_pages: free pages of each pool.
      used_pages: pages of each pool that running requests use.
      swapped_bytes: host memory of preempted requests.
      weight_bytes: bytes of the parameters, which are the model's own arrays.
      pool_bytes: bytes of all pages, used or free.
      row_bytes: bytes of everything else that rows keep: tails, windows, and the state that
        sampling needs.
      draft_bytes: bytes of a draft model: its cache, and parameters that it does not share with
        the model.
    """

    rows: int = 0
    running: int = 0
    waiting: int = 0
    pages: tuple[int, ...] = ()
    free_pages: tuple[int, ...] = ()
    used_pages: tuple[int, ...] = ()
    swapped_bytes: int = 0
    weight_bytes: int = 0
    pool_bytes: int = 0
    row_bytes: int = 0
    draft_bytes: int = 0

    @property
    def cached_pages(self) -> tuple[int, ...]:
        """Pages of each pool that only the prefix cache uses."""
        pools = zip(self.pages, self.free_pages, self.used_pages, strict=True)
        return tuple(max(pages - free - used, 0) for pages, free, used in pools)

    @property
    def usage(self) -> float:
        """The largest share of a pool that running requests use, from 0 to 1."""
        pools = zip(self.used_pages, self.pages, strict=True)
        return max((used / pages for used, pages in pools), default=0.0)


Transfer = Callable[[], None]
"""Completes a copy to the host that was started before, so that the device can free the arrays."""
Entry = tuple[int, Handle, int]
"""A place in a program's output, the request it is for, and the request's number of new tokens
before the program, or the beam."""


@dataclass
class InFlightStep:
    """The programs that a step has dispatched, and transfers that complete with them."""

    programs: list[tuple[ProgramOutput, list[Entry]]] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)

    def add(
        self, output: ProgramOutput, entries: list[Entry], transfers: Iterable[Transfer]
    ) -> None:
        """Add a program, and start the copy of its output to the host."""
        for x in jax.tree.leaves(output):
            x.copy_to_host_async()
        for _, handle, _ in entries:
            handle.in_flight += 1
        self.programs.append((output, entries))
        self.transfers += transfers


class InFlightSteps:
    """Steps in flight, oldest first.

    ``complete``: called with the transfers of a step that has come back; ``end``: called with a
    request that has ended, and its reason.
    """

    def __init__(
        self,
        counters: Counters,
        complete: Callable[[list[Transfer]], None],
        end: Callable[[Handle, str], None],
    ) -> None:
        self._counters, self._complete, self._end = counters, complete, end
        self._steps: deque[InFlightStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: InFlightStep) -> None:
        """Add a step, unless it has dispatched nothing."""
        if step.programs:
            self._steps.append(step)

    def collect(self, remaining: int) -> None:
        """Wait until at most ``remaining`` steps are in flight, and pass on their outputs."""
        while len(self._steps) > remaining:
            step, start = self._steps[0], time.perf_counter()
            # An interrupt while waiting leaves the step in place, to be collected later.
            outputs = fetch([output for output, _ in step.programs])
            self._counters.waiting_seconds += time.perf_counter() - start
            self._steps.popleft()
            self._complete(step.transfers)
            for output, (_, entries) in zip(outputs, step.programs, strict=True):
                for place, handle, before in entries:
                    handle.in_flight -= 1
                    if not handle.done:
                        self._apply(output, place, handle, before)

    def abandon(self) -> list[Handle]:
        """Forget all steps after a failure. Returns the requests that waited for them."""
        steps, self._steps = self._steps, deque()
        return [
            handle for step in steps for _, entries in step.programs for _, handle, _ in entries
        ]

    def _apply(self, output: ProgramOutput, place: int, handle: Handle, before: int) -> None:
        count, reason = apply_output(output, place, handle, before)
        self._counters.new_tokens += count
        if reason is None and count:
            handle.notify()
        if reason is not None or handle.error is not None:
            self._end(handle, reason or "error")


def apply_output(
    output: ProgramOutput, place: int, handle: Handle, before: int
) -> tuple[int, str | None]:
    """Give a request its new tokens.

    ``output``: ``ProgramOutput`` on the host; ``before``: the third item of ``Entry``. A request
    that is computed again after a preemption has some of the tokens already. Returns the number of
    new tokens, and why the request ends, None if it continues.
    """
    if handle.beams is not None:
        return _apply_beam(output, place, handle, handle.beams, before)
    count, known = int(output.count[place]) - before, max(len(handle.generated) - before, 0)
    tokens, most = output.tokens[place, known:count].tolist(), handle.request.logprobs
    scores = [] if most is None else token_scores(output.scores, place, known, count, most)
    handle.add_tokens(tokens, scores)
    if output.broken[place]:
        return len(tokens), _set_non_finite(handle, len(handle.generated))
    if handle.done:
        return len(tokens), "stop"
    if output.done[place] and len(handle.generated) == int(output.count[place]):
        ended = handle.generated[-1] in handle.request.eos
        return len(tokens), "eos" if ended else "length"
    return len(tokens), None


def _apply_beam(
    output: ProgramOutput, place: int, handle: Handle, beams: BeamSearchState, beam: int
) -> tuple[int, str | None]:
    """``apply_output`` for one row of a beam search, whose tokens are known only at the end."""
    if not beams.running:
        return 0, None
    if output.broken[place]:
        return 0, _set_non_finite(handle, int(output.count[place]))
    if not beams.add_candidates(output.scores, place, beam):
        return 1, None
    handle.add_beam_results()
    return 1, handle.beam_results[0].finish_reason if handle.beam_results else "error"


def _set_non_finite(handle: Handle, count: int) -> str:
    handle.error = NonFiniteError(
        f"the logits are not finite after {count} new tokens; no token was sampled from them"
    )
    return "error"
