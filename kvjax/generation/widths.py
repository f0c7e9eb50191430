"""What a request's programs are compiled for: capacities of its cache, and widths of chunks."""

from kvjax.cache.state import KVCache
from kvjax.generation.capacities import capacity_bucket
from kvjax.generation.request import Request


def text_capacities(request: Request, cache: KVCache) -> list[tuple[int, int]]:
    """The fewest and the most tokens a row that meet each capacity of a request's cache, which is
    given as it begins."""
    most = request.capacity if cache.grows_to is None else cache.max_len
    found = [(1, most)]
    while most < request.capacity:
        least, most = most + 1, min(capacity_bucket(most + 1), request.capacity)
        found.append((least, most))
    return found


def chunk_widths(request: Request, least: int, most: int) -> dict[int, int]:
    """The widths of a prompt's last chunk that meet a capacity, and of each the longest such chunk:
    as many lengths as have all widths that end there."""
    chunk, found = request.chunk, {}
    for held in range(least, min(least + chunk, most + 1)):
        rest = held - (held - 1) // chunk * chunk
        found.setdefault(request.width(rest), rest)
    return found
