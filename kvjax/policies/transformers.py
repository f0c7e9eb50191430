"""The settings of Transformers' quantized caches, under their names."""

from kvjax.codecs import MULTIPLE, Codec, HalfQuadratic, Integer
from kvjax.core.checks import whole_number
from kvjax.layouts import Dense
from kvjax.policies.cache_policy import CachePolicy


def transformers_policy(
    backend: str = "quanto",
    *,
    nbits: int = 4,
    axis_key: int = 0,
    axis_value: int = 0,
    q_group_size: int = 64,
    residual_length: int = 128,
) -> CachePolicy:
    """The policy of the settings of a quantized cache of Transformers, under their names.

    An axis means different things to the two backends: groups along a token's channels are axis 0
    of quanto and axis 1 of HQQ, groups along a channel's tokens axis -1 of quanto and axis 0 of HQQ
    (docs/quantization.md).

    Args:
      backend: ``"quanto"`` or ``"hqq"``.
      nbits: of each number: 2 or 4 with quanto, 1, 2, 3, 4 or 8 with HQQ.
      axis_key, axis_value: 0 or -1 with quanto, 0 or 1 with HQQ.
      q_group_size: numbers that share a scale. Along tokens, no more than a block of 64, nor than
        ``residual_length``.
      residual_length: the most tokens that stay raw, rounded down to whole blocks of 64, or of 8
        where it is less; 8 at least.

    Raises:
      ValueError: if a setting is none of the backend's.
    """
    known = {"quanto": ((2, 4), {0: "token", -1: "channel"}),
             "hqq": ((1, 2, 3, 4, 8), {1: "token", 0: "channel"})}  # fmt: skip
    if backend not in known:
        raise ValueError(f"backend={backend!r}: there are {', '.join(map(repr, known))}")
    widths, axes = known[backend]
    of_axes = ("axis_key", axis_key, axes), ("axis_value", axis_value, axes)
    for name, given, has in (("nbits", nbits, widths), *of_axes):
        if given not in has:
            raise ValueError(f"{name}={given!r}: {backend} has {', '.join(map(str, has))}")
    residual = max(whole_number("residual_length", residual_length, 1), MULTIPLE)
    block = min(64, residual // MULTIPLE * MULTIPLE)

    def codec(axis: int) -> Codec:
        group = min(q_group_size, block) if axes[axis] == "channel" else q_group_size
        plain = Integer(nbits, axes[axis], group, zero_point=True)
        return plain if backend == "quanto" else HalfQuadratic(plain)

    keys, values = codec(axis_key), codec(axis_value)
    return CachePolicy(Dense(), keys, values, block=block, recent=residual // block - 1)
