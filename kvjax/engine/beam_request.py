"""What an engine is asked for of a beam search, checked."""

from kvjax.generation.beams.searching import Search, rows_asked
from kvjax.generation.options import Options
from kvjax.prefixes.kinds import Kind
from kvjax.sampling.params import Filters
from kvjax.sampling.scores import MOST_SCORES


def search_of(options: Options, filters: Filters, ends: int, rows: int) -> Search | None:
    """The search of a request, None for one of a single text; ``ends``: tokens that end a text;
    ``rows``: of the engine.

    Raises:
      ValueError: naming what does not go together, or is more than there can be.
    """
    beams, search = rows_asked(options)
    if search is None:
        if beams > 1:
            raise ValueError(
                f"n is {beams}, and num_beams is 1: an engine has several texts of a beam search "
                "alone; of samples each is a request, see Engine.best_of"
            )
        return None
    if beams > rows:
        raise ValueError(f"num_beams is {beams}, each a row, and the engine has {rows}")
    if beams + ends > MOST_SCORES:
        raise ValueError(
            f"num_beams is {beams}, and {ends} tokens end a text: an engine's searches see the "
            f"{MOST_SCORES} likeliest tokens, so both may be {MOST_SCORES} together"
        )
    if options.guide is not None and not hasattr(options.guide, "copy"):
        raise ValueError("a guide beside num_beams has copy(): a copy goes along each beam")
    for name, given in (
        ("logit_bias", filters.bias), ("repetition_penalty", filters.repetition_penalty),
        ("frequency_penalty", options.frequency_penalty),
        ("presence_penalty", options.presence_penalty), ("no_repeat_ngram_size", filters.ngrams),
    ):  # fmt: skip
        if given:
            raise ValueError(
                f"{name} was given together with num_beams: it changes what any token is worth, "
                f"and an engine's searches see the {MOST_SCORES} likeliest alone"
            )
    return search


def most_pages(kind: Kind, prompt: int, tokens: int, beams: int) -> int:
    """Pages that the beams of a text have at once, at most, on their way to so many tokens: those
    that its prompt fills are the same."""
    shared = 0 if kind.moves else len(kind.needed(prompt)[0])
    return shared + beams * (kind.most(tokens) - shared)
