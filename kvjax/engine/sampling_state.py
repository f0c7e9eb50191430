"""What the host tells the device of each row: numbers of sampling, limits, scores."""

from dataclasses import fields
from typing import Any

import jax
import numpy as np

from kvjax.core.transfer import commit
from kvjax.engine.programs import SamplingParams
from kvjax.engine.request import MOST_BIASED, MOST_ENDS, Request
from kvjax.placement.device import Device
from kvjax.sampling.params import NO_TOKEN, SamplingArrays, prepare_sampling
from kvjax.sampling.scores import MAX_LOGPROBS


class SamplingState:
    """What each row is asked for, as arrays of the host; on the device as long as nobody changes
    them."""

    def __init__(self, rows: int, placement: Device) -> None:
        self._placement, self._there = placement, None
        sampling: Any = prepare_sampling(seeds=[0] * rows)[1]
        wide = {"eos": MOST_ENDS, "biased": MOST_BIASED, "bias": MOST_BIASED}
        self._fill = {"eos": NO_TOKEN, "biased": NO_TOKEN, "bias": 0}
        arrays: dict[str, Any] = {
            each.name: getattr(sampling, each.name).copy() for each in fields(SamplingArrays)
        }
        for name, width in wide.items():
            arrays[name] = np.full((rows, width), self._fill[name], arrays[name].dtype)
        zeros = np.zeros(rows, np.int32)
        asked: Any = SamplingArrays(**arrays), zeros, zeros.copy(), zeros > 0
        self._asked: Any = SamplingParams(*asked)

    def set(self, row: int, request: Request) -> None:
        """Let a row be this request's."""
        for each in fields(SamplingArrays):
            array = getattr(self._asked.sampling, each.name)
            new = np.asarray(getattr(request.sampling, each.name)[0])
            if each.name in self._fill:
                array[row] = self._fill[each.name]
                count = min(len(new), array.shape[1])
                array[row, :count] = new[:count]
            else:
                array[row] = new
        self._asked.limit[row] = request.limit
        scored = request.scores if request.search is None else MAX_LOGPROBS
        self._asked.scores[row] = 0 if scored is None else 1 + scored
        self._asked.search[row] = request.search is not None
        self._there = None

    def clear(self, row: int) -> None:
        """Let a row ask for nothing that makes the others' programs do more."""
        self._asked.sampling.temperature[row] = 0
        self._asked.sampling.repetition_penalty[row] = 1
        self._asked.sampling.min_new_tokens[row] = 0
        self._asked.sampling.top_k[row], self._asked.sampling.top_p[row] = NO_TOKEN, 2
        self._asked.sampling.min_p[row], self._asked.sampling.typical_p[row] = 0, 2
        self._asked.sampling.frequency_penalty[row] = 0
        self._asked.sampling.presence_penalty[row] = 0
        self._asked.sampling.no_repeat_ngram_size[row] = 0
        self._asked.sampling.biased[row] = NO_TOKEN
        self._asked.scores[row], self._asked.search[row] = 0, False
        self._there = None

    def all(self) -> SamplingParams:
        """Of all rows, on the device."""
        if self._there is None:
            # A copy: what is put may be read later.
            self._there = commit(self._placement.put(jax.tree.map(np.array, self._asked)))
        return self._there

    def some(self, rows: Any) -> SamplingParams:
        """Of all rows, or of some, int32[n], among which may be such as are none."""
        count = len(self._asked.limit)
        return self.all() if len(rows) == count else self.of(np.minimum(rows, count - 1))

    def of(self, rows: Any) -> SamplingParams:
        """Of some rows, on the host; copies, for a program may read them later."""
        return jax.tree.map(lambda x: x[rows].copy(), self._asked)
