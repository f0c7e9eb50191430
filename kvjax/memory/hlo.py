"""What a compiled program moves, makes and sends, read from its optimized HLO text."""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple


class Result(NamedTuple):
    """An array: its shape and layout as written, its bytes whatever its tiles are padded to, and
    its memory, where 0 is the device's main one, 1 a TPU's VMEM, and 5 the host's."""

    text: str
    nbytes: int
    memory: int


@dataclass(frozen=True, eq=False)
class Instruction:
    """A line of a program: ``kind`` is the opcode, of something asynchronous without ``-start``,
    of a custom call with its target; ``results`` the arrays that it makes, of a tuple all;
    ``called`` the computations that it runs, or of which it runs one; ``number`` a parameter's."""

    name: str
    kind: str
    started: bool
    results: tuple[Result, ...]
    operands: tuple["Instruction", ...]
    called: tuple["Computation", ...]
    number: int
    attributes: str

    @property
    def nbytes(self) -> int:
        """Bytes of the results."""
        return sum(result.nbytes for result in self.results)

    @property
    def title(self) -> str:
        """The opcode, of a fusion with those that give its results."""
        made = [x.kind for x in self.called[0].outputs] if self.kind == "fusion" else []
        return self.kind + "-start" * self.started + ":" * bool(made) + ",".join(made)


@dataclass(frozen=True, eq=False)
class Computation:
    """Instructions as they are scheduled, and those that give the result, of a tuple all."""

    instructions: tuple[Instruction, ...]
    outputs: tuple[Instruction, ...]


class Program(NamedTuple):
    """All computations, and the one that is run."""

    computations: tuple[Computation, ...]
    entry: Computation


_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) (?:\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r" +(ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(|, [\w-]+=.*)$")
_NAME = re.compile(r"%([\w.-]+)")
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([^\]]*)\](?:\{[^}]*\})?")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|\w+_computations?)=(\{[^}]*\}|%[\w.-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{")
_PREFETCH = "cross_program_prefetch_index"

_RUNS = {"while", "conditional", "call", "async"}
_VIEWS = {*_RUNS, "parameter", "tuple", "get-tuple-element", "bitcast", "opt-barrier"}
_STILL = {"constant", "iota", "after-all", "partition-id", "replica-id"}
_STILL |= {"custom-call:AllocateBuffer"}  # which has no contents
_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # and which operand they write
# Of what these make a fusion computes the part that is wanted.
_FOLLOWED = {"bitcast-convert", "convert", "copy", "reshape", "transpose", *_UPDATES}


def bytes_moved(text: str, trips: int = 1) -> int:
    """Bytes that a program reads from and writes to main memory when it runs once; a loop runs
    ``trips`` times where the text does not say how often."""
    return sum(size for size, _ in bytes_by_instruction(text, trips))


def bytes_by_instruction(text: str, trips: int = 1) -> list[tuple[int, str]]:
    """What ``bytes_moved`` adds up, largest first: bytes of an instruction, and what it is."""
    return sorted(_rows(parse_hlo(text).entry, 1, trips), reverse=True)


def large_results(text: str, at_least: int) -> list[str]:
    """Arrays of at least so many bytes that a program makes, in whatever memory, unless by an
    update in place: the opcode, and the shape with its layout."""
    computations = parse_hlo(text).computations
    every = [x for computation in computations for x in computation.instructions]
    fused = {called for x in every if x.kind not in _RUNS for called in x.called}
    return [
        f"{instruction.title} {result.text}"[:160]
        for computation in computations
        for instruction in computation.instructions
        if computation not in fused and not _is_view(instruction)
        for result, written in _written(instruction)
        if result.nbytes >= at_least and written is None
    ]


def parse_hlo(text: str) -> Program:
    """The program that a text writes down."""
    computations: dict[str, Computation] = {}
    known: dict[str, Instruction] = {}
    entry = name = root = ""
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            known, name = {}, opened[2]
            entry = name if opened[1] else entry
        elif found := _INSTRUCTION.match(line):
            known[found[2]] = _instruction(found, known, computations)
            root = found[2] if found[1] else root
        elif line.startswith("}"):
            outputs = known[root].operands if known[root].kind == "tuple" else (known[root],)
            computations[name] = Computation(tuple(known.values()), outputs)
    return Program(tuple(computations.values()), computations[entry])


def _instruction(
    line: re.Match[str], known: dict[str, Instruction], computations: dict[str, Computation]
) -> Instruction:
    """An instruction, where those before it and the computations that it runs are known."""
    _, name, shape, opcode, inside, attributes = line.groups()
    kind = opcode.removesuffix("-start")
    operands = tuple(known[operand] for operand in _NAME.findall(inside))
    results = tuple(_result(found) for found in _ARRAY.finditer(shape))
    if started := kind != opcode:  # What is made is behind what is given, of a copy before it.
        given = sum(len(operand.results) for operand in operands) * (kind != "copy")
        made = [x for x in results[given:] if not x.text.startswith(("s32[]", "u32[]"))]
        results = tuple(made[:1] if kind == "copy" else made) or results
    called = tuple(computations[x] for x in _NAME.findall(" ".join(_CALLED.findall(attributes))))
    number = int(inside) if kind == "parameter" else -1
    kind = ":".join([kind, *_TARGET.findall(attributes)])
    return Instruction(name, kind, started, results, operands, called, number, attributes)


def _result(found: re.Match[str]) -> Result:
    """An array, of how it is written."""
    bits = int(found[1] or 8) * math.prod(int(size) for size in re.findall(r"\d+", found[2]))
    memory = re.findall(r"S\((\d+)\)", found[0])
    return Result(found[0], -(-bits // 8), int(memory[0]) if memory else 0)


def _rows(computation: Computation, times: int, trips: int) -> list[tuple[int, str]]:
    """The rows of ``bytes_by_instruction`` for a computation that runs so many times."""
    rows: list[tuple[int, str]] = []
    starts = [x for x in computation.instructions if x.started and _PREFETCH not in x.attributes]
    again = {operand for start in starts for operand in start.operands}
    for instruction in computation.instructions:
        if instruction.kind in _RUNS:
            known = _TRIPS.findall(instruction.attributes) or [trips]
            steps = times * int(known[0]) if instruction.kind == "while" else times
            each = [_rows(called, steps, trips) for called in instruction.called]
            rows += max(each, key=lambda rows: sum(size for size, _ in rows))
        # What the run before has fetched for this one, this one fetches for the next.
        elif _PREFETCH not in instruction.attributes or again.isdisjoint(instruction.operands):
            words = instruction.title, instruction.name, *(x.text for x in instruction.results)
            rows.append((times * _moved(instruction), " ".join(words)[:160]))
    return [row for row in rows if row[0]]


def _is_view(instruction: Instruction) -> bool:
    """Whether an instruction only names, awaits or runs what makes its results. Of reshapes the
    compiler leaves others only where arrays have tiles."""
    if instruction.kind == "reshape":
        return "T(" not in instruction.results[0].text + instruction.operands[0].results[0].text
    return instruction.kind in _VIEWS or instruction.kind.endswith(("-done", "-update"))


def _moved(instruction: Instruction) -> int:
    """Bytes that an instruction reads from main memory and writes there."""
    if instruction.kind in _STILL or _is_view(instruction):
        return 0
    moved = 0
    for number, operand in enumerate(instruction.operands):
        there = sum(result.nbytes for result in operand.results if not result.memory)
        moved += min(there, round(_part(instruction, number) * operand.nbytes))
    for result, written in _written(instruction):
        if not result.memory:
            moved += result.nbytes if written is None else written
    return moved


def _part(user: Instruction, number: int) -> float:
    """Which part of an operand an instruction reads."""
    if user.kind in _SLICES and number == 0:
        return user.nbytes / max(user.operands[0].nbytes, 1)
    if user.kind == "tuple" or (user.kind in _UPDATES and number == 0):
        return 0.0
    if user.kind in ("fusion", "call"):
        fused = user.called[0]
        in_place = {x for output in fused.outputs for x in _in_place(output)}
        return sum(_share(fused, x, in_place) for x in fused.instructions if x.number == number)
    return 1.0


def _share(fused: Computation, array: Instruction, in_place: set[Instruction]) -> float:
    """Which part of an array a fused computation reads, more than 1 where some of it twice."""
    total = float(array in fused.outputs and array not in in_place)
    for user in fused.instructions:
        for number in (n for n, operand in enumerate(user.operands) if operand is array):
            followed = number == 0 and (user.kind in _FOLLOWED or _names(user))
            total += _share(fused, user, in_place) if followed else _part(user, number)
    return total


def _written(instruction: Instruction) -> list[tuple[Result, int | None]]:
    """The results, and how many bytes of each are written where it takes an operand's place."""
    written: list[int | None] = [None] * len(instruction.results)
    for number in _aliased(instruction):
        written[number] = instruction.results[number].nbytes * (instruction.kind == "fusion")
    outputs = instruction.called[0].outputs if instruction.kind == "fusion" else (instruction,)
    for number, output in enumerate(outputs if len(outputs) == len(written) else ()):
        chain = [output] if output is instruction else _in_place(output)
        updates = [x.operands[_UPDATES[x.kind]] for x in chain if x.kind in _UPDATES]
        written[number] = sum(x.nbytes for x in updates) if updates else written[number]
    return list(zip(instruction.results, written, strict=True))


def _in_place(output: Instruction) -> list[Instruction]:
    """What leads by updates alone from a parameter of a fused computation to an output."""
    chain = [output]
    while chain[-1].kind in _UPDATES or _names(chain[-1]):
        chain.append(chain[-1].operands[0])
    updated = any(array.kind in _UPDATES for array in chain)
    return chain if updated and chain[-1].kind == "parameter" else []


def _names(fused: Instruction) -> bool:
    """Whether a fused instruction only names what it is given."""
    if fused.kind != "fusion" or _aliased(fused):
        return fused.kind in {"bitcast", "get-tuple-element", "fusion"}
    return {x.kind for x in fused.called[0].instructions} <= {"bitcast", "parameter"}


def _aliased(instruction: Instruction) -> list[int]:
    """Which results stand in the place of an operand of the same size."""
    given, made = instruction.operands, instruction.results
    pairs = [(int(to or 0), int(by)) for to, by in _ALIAS.findall(instruction.attributes)]
    return [to for to, by in pairs if made[to:] and made[to].nbytes == given[by].nbytes]


COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute",
    "reduce-scatter",
)  # fmt: skip
_LIST = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTS = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
"""How a text says which devices take part with one another: by their numbers, by how many groups
there are of how many, or by the axes of a mesh."""


@dataclass(frozen=True)
class Collective:
    """A collective: its ``kind``, the ``bytes`` that a device has after it, and how many
    ``devices`` take part with one another."""

    kind: str
    bytes: int
    devices: int

    @property
    def sent(self) -> int:
        """Bytes that a device sends, at least: of what it gives, to the others round a ring."""
        others = self.devices - 1
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        if self.kind == "reduce-scatter":
            return others * self.bytes
        twice = 2 if self.kind == "all-reduce" else 1
        return twice * others * self.bytes // max(self.devices, 1)


def collectives(text: str, devices: int = 1) -> list[Collective]:
    """Those of a compiled program, each once, however often it runs. ``devices``: of the mesh,
    among which are those that take part where the text does not say which."""
    return [
        Collective(instruction.kind, instruction.nbytes, _together(instruction, devices))
        for computation in parse_hlo(text).computations
        for instruction in computation.instructions
        if instruction.kind in COLLECTIVES
    ]


def _together(instruction: Instruction, devices: int) -> int:
    """How many devices take part with one another."""
    said = instruction.attributes
    if found := _LIST.search(said):
        return len(found[1].split(","))
    if found := _COUNTS.search(said):
        return int(found[1])
    if found := _MESH.search(said):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])  # of an axis perhaps a part
        return math.prod(int(part or sizes[name]) for name, part in axes)
    return devices
