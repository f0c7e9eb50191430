"""Which way a request runs: each row by itself, as beams, or the best of samples."""

from contextlib import nullcontext

from kvjax.generation.beams.streaming import BeamStream
from kvjax.generation.best_of import BestOf
from kvjax.generation.loaded import LanguageModel
from kvjax.generation.prompts import Chunk
from kvjax.generation.request import Request
from kvjax.generation.results import GenerationResult
from kvjax.generation.streaming import Stream

Running = Stream | BeamStream | BestOf
"""An iterator over pieces, with the ``result`` after the last one."""


def running(
    lm: LanguageModel, request: Request, *, watched: bool, chunks: list[Chunk] | None = None
) -> Running:
    """A generation that runs as it is iterated over; ``watched``: somebody waits for its text.

    Raises:
      ValueError: if the best of samples is waited for.
    """
    search = request.search
    if search is None:
        return Stream(lm, request, watched=watched, chunks=chunks)
    if search.beams is not None:
        return BeamStream(lm, request, watched=watched, chunks=chunks)
    if watched:
        raise ValueError("best_of can't be streamed: which sample is best shows at the end")
    return BestOf(lm, request, chunks=chunks)


def ran(
    lm: LanguageModel, request: Request, *, chunks: list[Chunk] | None = None
) -> GenerationResult:
    """The result of a generation that is not streamed. Threads that use the same prefix tree run
    one after the other."""
    found, prefixes = running(lm, request, watched=False, chunks=chunks), request.prefixes
    with nullcontext() if prefixes is None else prefixes.tree.turns.taken():
        for _ in found:
            pass
    return found.result
