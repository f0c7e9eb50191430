"""How many texts of a prompt are made, and which of them are given back."""

from typing import Any

from kvjax.serve.errors import Refused
from kvjax.serve.fields import Fields
from kvjax.serve.parse_request import Asked


def read_several(fields: Fields, asked: Asked, most: int) -> None:
    """Take the fields that say it; ``most``: texts that are ever made at once.

    Raises:
      Refused: naming the field.
    """
    asked.n = fields.whole("n", 1) or 1
    best = fields.whole("best_of", 1)
    if best is not None and best < asked.n:
        message = f"best_of is {best}, and n is {asked.n}: no more than all can be the best"
        raise Refused(400, message, param="best_of")
    name, several = ("n", asked.n) if best in (None, asked.n) else ("best_of", best)
    width, penalty = fields.whole("beam_width", 1), fields.number("length_penalty")
    early: Any = fields.raw("early_stopping")
    if fields.flag("use_beam_search"):
        name, asked.beams = (name, several) if width is None else ("beam_width", width)
        _read_search(asked, penalty, early)
    else:
        for its, value, usual in (
            ("beam_width", width, 1), ("length_penalty", penalty, 1), ("early_stopping", early, 0),
        ):  # fmt: skip
            if value not in (None, usual):
                raise Refused(400, f"{its} is of a beam search: use_beam_search", param=its)
        asked.samples = several
    if asked.places > most:
        message = f"{name} asks for {asked.places} choices in all: this server takes {most} at once"
        raise Refused(400, message, param=name)


def _read_search(asked: Asked, penalty: float | None, early: Any) -> None:
    if asked.beams < max(asked.n, 2):
        least = max(asked.n, 2)
        message = (
            f"a search for {asked.n} texts needs a beam_width, or best_of, of {least} at least"
        )
        raise Refused(400, message, param="beam_width")
    settings = asked.settings
    settings["num_beams"], settings["n"] = asked.beams, asked.n
    settings["length_penalty"] = 1.0 if penalty is None else penalty
    settings["early_stopping"] = False if early is None else early


def check_whole(asked: Asked) -> None:
    """Raise ``Refused`` for what is asked for piece by piece, and is only known at the end."""
    if asked.stream and (asked.samples > asked.n or asked.beams > 1):
        name = "best_of" if asked.beams == 1 else "use_beam_search"
        message = f"which texts are the best shows at their end: {name} can't be streamed"
        raise Refused(400, message, param=name)
