"""Prompts in chunks, on the device."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.generation.request import Request
from kvjax.placement.device import Device


@dataclass(frozen=True)
class Chunk:
    """Tokens of the prompts that are fed together.

    ``tokens``: int32[batch, new], padded on the right, on the device; ``lengths``: int32[batch],
    how many are real; ``ends``: bool[batch], rows whose prompts end here; ``held``: tokens that the
    longest row holds after it.
    """

    tokens: Any
    lengths: np.ndarray
    ends: np.ndarray
    held: int


def prompt_chunks(request: Request, hits: np.ndarray | int = 0) -> list[Chunk]:
    """The chunks of a request's prompts behind their first ``hits`` tokens, int[batch], which the
    cache has already; their tokens are on their way to the device."""
    hits = np.broadcast_to(hits, len(request.prompts))
    prompts = [ids[hit:] for ids, hit in zip(request.prompts, hits, strict=True)]
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    chunks = []
    for start in range(0, int(lengths.max()), request.chunk):
        here = np.clip(lengths - start, 0, request.chunk)
        tokens = np.zeros((len(lengths), request.width(int(here.max()))), np.int32)
        for row, ids in enumerate(prompts):
            tokens[row, : here[row]] = ids[start : start + request.chunk]
        held = int((request.start + hits + np.minimum(lengths, start + request.chunk)).max())
        ends = (lengths > start) & (lengths <= start + request.chunk)
        chunks.append(Chunk(Device(spread=request.spread).put(tokens), here, ends, held))
    return chunks
