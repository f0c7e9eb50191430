"""Run a program equation by equation, and note what moves between memories."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend as jex
import numpy as np

_CALLS = {"pjit", "jit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call",
          "custom_vjp_call"}  # fmt: skip


@dataclass
class Moves:
    """Bytes of every move that took place, by where it went, in their order."""

    to: dict[str, list[int]] = field(default_factory=lambda: {"Host": [], "Device": []})


def run(program: Any, *args: Any) -> tuple[Any, Moves]:
    """The outputs of ``jax.make_jaxpr(f)(*args)``, as a list, and what moved on the way."""
    moves = Moves()
    return _run(program.jaxpr, program.consts, jax.tree.leaves(args), moves), moves


def _run(jaxpr: Any, consts: Any, args: Any, moves: Moves) -> list[Any]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        given = [value(atom) for atom in equation.invars]
        found = _one(equation, given, moves)
        known.update(zip(equation.outvars, found, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _one(equation: Any, given: list[Any], moves: Moves) -> Any:
    name, params = equation.primitive.name, equation.params
    if name in _CALLS:
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        return _inner(inner, given, moves)
    if name == "cond":
        branch = params["branches"][int(np.clip(given[0], 0, len(params["branches"]) - 1))]
        return _inner(branch, given[1:], moves)
    if name == "while":
        first, second = params["cond_nconsts"], params["body_nconsts"]
        test, body, carry = given[:first], given[first:][:second], given[first + second :]
        while bool(_inner(params["cond_jaxpr"], [*test, *carry], moves)[0]):
            carry = _inner(params["body_jaxpr"], [*body, *carry], moves)
        return carry
    if name == "scan":
        return _scan(params, given, moves)
    if name == "device_put":
        for before, after in zip(equation.invars, equation.outvars, strict=True):
            here, there = before.aval.memory_space, after.aval.memory_space
            if here != there:
                size = math.prod(after.aval.shape) * after.aval.dtype.itemsize
                moves.to[there.name].append(size)
    found = equation.primitive.bind(*given, **equation.primitive.get_bind_params(params))
    return found if equation.primitive.multiple_results else [found]


def _inner(jaxpr: Any, given: Any, moves: Moves) -> list[Any]:
    return _run(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), given, moves)


def _scan(params: Any, given: list[Any], moves: Moves) -> list[Any]:
    if "ft_in" in params:  # JAX 0.12
        consts, carried, _ = map(len, params["ft_in"].unpack())
    else:
        consts, carried = params["num_consts"], params["num_carry"]
    fixed, carry, given = given[:consts], given[consts:][:carried], given[consts + carried :]
    rows = []
    for step in range(params["length"]):
        found = _inner(params["jaxpr"], [*fixed, *carry, *(x[step] for x in given)], moves)
        carry = found[:carried]
        rows.append(found[carried:])
    return [*carry, *(jax.numpy.stack(each) for each in zip(*rows, strict=True))]
