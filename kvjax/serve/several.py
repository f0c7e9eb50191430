"""How many texts of a prompt are made, and which of them are given back."""

from kvjax.serve.asked import Asked
from kvjax.serve.fields import Fields
from kvjax.serve.refused import Refused


def read_several(fields: Fields, asked: Asked, most: int) -> None:
    """Take the fields that say it; ``most``: texts that are ever made at once.

    Raises:
      Refused: naming the field.
    """
    asked.n = fields.whole("n", 1) or 1
    best = fields.whole("best_of", 1)
    asked.samples = asked.n if best is None else best
    if asked.samples < asked.n:
        message = f"best_of is {best}, and n is {asked.n}: no more than all can be the best"
        raise Refused(400, message, param="best_of")
    name = "n" if asked.samples == asked.n else "best_of"
    if asked.choices > most:
        message = f"{name} asks for {asked.choices} choices in all: this server takes {most}"
        raise Refused(422, f"{message} at once", param=name)


def check_whole(asked: Asked) -> None:
    """Raise ``Refused`` for what is asked for piece by piece, and is only known at the end."""
    if asked.stream and asked.samples > asked.n:
        message = "which samples are the best shows at their end: best_of can't be streamed"
        raise Refused(400, message, param="best_of")
