"""The request parameters of every row, as arrays."""

from dataclasses import fields
from typing import Any

import jax
import numpy as np

from kvjax.core.transfer import commit
from kvjax.engine.programs import RowParams
from kvjax.engine.request import MAX_BIASED_TOKENS, MAX_EOS_TOKENS, Request
from kvjax.placement.device import Device
from kvjax.sampling.params import NO_TOKEN, SamplingArrays, prepare_sampling
from kvjax.sampling.scores import MAX_LOGPROBS

_PADDING = {
    "eos": (MAX_EOS_TOKENS, NO_TOKEN),
    "biased": (MAX_BIASED_TOKENS, NO_TOKEN),
    "bias": (MAX_BIASED_TOKENS, 0),
}
"""Width and padding of the sampling parameters that are lists of tokens."""


class SamplingState:
    """``RowParams`` of all rows on the host, with a copy on the device while no row changes.

    A row without a request has the parameters of a greedy request without any filter, so that it
    does not switch filters on for the others.
    """

    def __init__(self, rows: int, placement: Device) -> None:
        self._placement = placement
        self._on_device: RowParams | None = None
        self._neutral = _row_params(prepare_sampling(seeds=[0])[1], 0, 0, False)
        self._params: RowParams = jax.tree.map(lambda x: np.repeat(x, rows, axis=0), self._neutral)

    def set(self, row: int, request: Request) -> None:
        """Give a row the parameters of a request."""
        logprobs = request.logprobs if request.search is None else MAX_LOGPROBS
        number = 0 if logprobs is None else 1 + logprobs
        searching = request.search is not None
        self._write(row, _row_params(request.sampling, request.max_new_tokens, number, searching))

    def clear(self, row: int) -> None:
        """Give a row the parameters of a row without a request."""
        self._write(row, self._neutral)

    def for_rows(self, rows: np.ndarray) -> RowParams:
        """Parameters of ``rows``, int32[n]: all rows in order, or some on the host, among which
        numbers beyond the last row select the last row."""
        count = len(self._params.limit)
        return self.all_rows() if len(rows) == count else self.copy(np.minimum(rows, count - 1))

    def all_rows(self) -> RowParams:
        """Parameters of all rows, on the device."""
        if self._on_device is None:
            # A copy, since the transfer may read the arrays later.
            params = jax.tree.map(np.array, self._params)
            self._on_device = commit(self._placement.put(params))
        params: RowParams = self._on_device
        return params

    def copy(self, rows: np.ndarray) -> RowParams:
        """Parameters of ``rows`` on the host; copies, since a program may read them later."""
        return jax.tree.map(lambda x: x[rows].copy(), self._params)

    def _write(self, row: int, params: RowParams) -> None:
        pairs = zip(jax.tree.leaves(self._params), jax.tree.leaves(params), strict=True)
        for array, new in pairs:
            array[row] = new[0]
        self._on_device = None


def _row_params(sampling: SamplingArrays, limit: int, logprobs: int, search: bool) -> RowParams:
    """``RowParams`` of a single row, padded to the width that all rows have."""
    arrays: dict[str, Any] = {}
    for field in fields(SamplingArrays):
        array = np.asarray(getattr(sampling, field.name))
        if field.name in _PADDING:
            width, padding = _PADDING[field.name]
            new = np.full((1, width), padding, array.dtype)
            array = array[:, :width]
            new[:, : array.shape[1]] = array
            array = new
        arrays[field.name] = array
    numbers: Any = np.array([limit], np.int32), np.array([logprobs], np.int32), np.array([search])
    return RowParams(SamplingArrays(**arrays), *numbers)
