"""Random JSON schemas, all of whose texts are short."""

from typing import Any

import numpy as np

NAMES = ("name", "x", "is it?", "größe", "items", 'a"b\\c', "kind", "日本")
PATTERNS = ("^[a-c]{2,4}$", "^(ja|nein)$", r"^\d{2}-\d{2}$", "^[A-Z][a-z]{1,5}$", "^x{0,4}y$")
VALUES: tuple[Any, ...] = (0, -3, 1.5, True, False, None, "one", 'a "word"', "é", [1, 2], {"a": 1})


def random_schema(rng: np.random.Generator, depth: int = 3) -> dict[str, Any]:
    """A schema whose objects and arrays stand at most so deep in one another."""
    kinds = (_text, _text, _whole, _number, _one_of, _flag)
    if depth:
        kinds += (_object, _object, _object, _array, _array, _any_of)
    return kinds[rng.integers(len(kinds))](rng, depth)


def _text(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {"type": "string", "pattern": str(rng.choice(PATTERNS))}
    least = int(rng.integers(0, 4))
    return {"type": "string", "minLength": least, "maxLength": least + int(rng.integers(0, 6))}


def _whole(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    least = int(rng.integers(-1000, 1000))
    found: dict[str, Any] = {"type": "integer", "minimum": least}
    return found | {"maximum": least + int(rng.integers(0, 5000))}


def _number(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    """Of quarters, for a model without sense goes on with digits for ever."""
    least = float(rng.integers(-200, 200)) / 4
    end = "maximum" if rng.random() < 0.5 else "exclusiveMaximum"
    bounds = {"minimum": least, end: least + 1 + float(rng.integers(0, 9))}
    return {"type": "number", "multipleOf": 0.25, **bounds}


def _one_of(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    chosen = rng.choice(len(VALUES), rng.integers(1, 4), replace=False)
    values = [VALUES[each] for each in chosen]
    return {"const": values[0]} if len(values) == 1 else {"enum": values}


def _flag(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"type": ["boolean", "null"] if rng.random() < 0.5 else "boolean"}


def _object(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    names = [str(name) for name in rng.permutation(NAMES)[: rng.integers(1, 4)]]
    return {
        "type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7], "additionalProperties": False,
    }  # fmt: skip


def _array(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    least = int(rng.integers(0, 2))
    found: dict[str, Any] = {"type": "array", "items": random_schema(rng, depth - 1)}
    return found | {"minItems": least, "maxItems": least + int(rng.integers(0, 3))}


def _any_of(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.integers(2, 4))]}
