"""What codecs with scales have in common: which 16 bits, and what they decode to."""

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.codecs.raw import Raw


def check_scales(scales: Raw | None) -> None:
    """Raise ``ValueError`` for a dtype that has not 16 bits."""
    if scales is not None and scales.dtype not in (None, "float16", "bfloat16"):
        raise ValueError(f"scales have 16 bits, not those of {scales.dtype}")


def within(x: Array, dtype: str | None) -> Array:
    """float32 numbers that ``dtype`` has too: a scale that was rounded up may lead beyond float16's
    largest."""
    if dtype != "float16":
        return x
    largest = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(x, -largest, largest)


def with_dtypes(
    dtype: str | None, scales: Raw | None, model_dtype: str | None, platform: str
) -> tuple[str | None, Raw]:
    """The dtype that is decoded to, and the codec of scales: float16 beside float16, else bfloat16,
    which has float32's range."""
    fixed = Raw(dtype).resolve(model_dtype, platform).dtype
    usual = "float16" if fixed == "float16" else "bfloat16"
    return fixed, (scales or Raw()).resolve(usual, platform)
