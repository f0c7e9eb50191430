"""Prompts as a cache, and what the model says behind them."""

from dataclasses import replace

from jax.sharding import Mesh

from kvjax.cache.state import KVCache
from kvjax.core.context import outside
from kvjax.generation.loaded import LanguageModel
from kvjax.generation.prompts import prompt_chunks
from kvjax.generation.request import prepare
from kvjax.generation.session import Session
from kvjax.generation.settings import CacheChoice, Options
from kvjax.generation.sources import check_read
from kvjax.generation.words import Prompts
from kvjax.memory.planning import PREFILL
from kvjax.policies.positions import position_limit
from kvjax.sampling.filters import Logits


@outside
def prefill(
    lm: LanguageModel,
    prompts: Prompts,
    *,
    cache: CacheChoice = "static",
    max_len: int | None = None,
    rotary_len: int | None = None,
    prefill_chunk: int = PREFILL,
    mesh: Mesh | None = None,
) -> tuple[KVCache, Logits]:
    """Read prompts into a cache, as ``generate`` does before its first token.

    Args:
      lm, prompts, cache, max_len, rotary_len, prefill_chunk, mesh: as of ``generate``; without
        ``max_len`` there is room for a token more, rounded up, as far as the model has positions.

    Returns:
      The cache, and the logits behind each prompt, float32[batch, vocab]. Any loop of one's own
      goes on from these; ``kvjax.repeat(cache, n)`` has each prompt ``n`` times.

    Raises:
      ValueError, CacheOverflowError: as ``generate``.
    """
    check_read(lm)
    lm = lm if mesh is None else lm.on(mesh)
    options = Options(
        max_new_tokens=1, cache=cache, max_len=max_len, rotary_len=rotary_len,
        prefill_chunk=prefill_chunk,
    )  # fmt: skip
    request = prepare(lm, prompts, options)
    full = request.capacity == request.need != position_limit(lm.config)
    if max_len is None and request.cache is None and full:
        # Room for the token that the caller appends next.
        request = prepare(lm, prompts, replace(options, max_new_tokens=2))
    session = Session(lm, request)
    session.start()
    for chunk in prompt_chunks(request):
        session.make_room(chunk.held)
        session.fill(chunk)
    session.check()
    assert session.cache is not None
    return session.cache, session.logits[: request.rows]
