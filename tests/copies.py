"""Find copies of a cache in a compiled program: its text names every instruction's result."""

import re
from typing import Any

import numpy as np

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip

_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<dtype>\w+)\[(?P<shape>[\d,]*)\]\S* "
    r"(?P<op>[\w-]+)\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) (?:\(.*)?\{\s*$")

# These name an array that is there already, or write a part of one where it stands.
_FREE = {
    "parameter", "get-tuple-element", "bitcast", "dynamic-update-slice", "scatter", "while",
    "conditional", "call", "optimization-barrier",
}  # fmt: skip


def copies(compiled: Any, at_least: int) -> list[str]:
    """Instructions of a compiled program that yield ``at_least`` bytes or more, updates in place
    aside. A fusion is judged by its root, and what is fused is judged itself."""
    computation, roots, found = "", {}, []
    for line in compiled.as_text().splitlines():
        if opened := _COMPUTATION.match(line):
            computation = opened["name"]
        elif instruction := _INSTRUCTION.match(line):
            if instruction["root"]:
                roots[computation] = instruction["op"]
            size = _BYTES.get(instruction["dtype"], 0)
            size *= int(np.prod([int(n) for n in instruction["shape"].split(",") if n]))
            if size >= at_least:
                found.append((instruction["op"], instruction["rest"], line.strip()))
    bad = []
    for op, rest, line in found:
        if op == "fusion":
            called = re.search(r"calls=%?([\w.-]+)", rest)
            op = roots.get(called[1], op) if called else op
        if op not in _FREE:
            bad.append(line[:200])
    return bad


def assert_no_copy(compiled: Any, cache_bytes: int, layer_bytes: int) -> None:
    """The copy law: the cache is aliased, and nothing of half a layer's body is made."""
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert copies(compiled, layer_bytes // 2) == []
