"""Memory traffic, large arrays and collectives of a compiled program, from its HLO text.

The text is the optimized and scheduled HLO of ``compiled.as_text()``. Nothing is executed.
"""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple


class Result(NamedTuple):
    """An array that an instruction produces.

    Attributes:
      text: the shape and the layout, as written in the HLO text.
      nbytes: bytes, without the padding of tiles.
      memory: 0 for the device's main memory, 1 for a TPU's VMEM, 5 for host memory.
    """

    text: str
    nbytes: int
    memory: int


@dataclass(frozen=True, eq=False)
class Instruction:
    """An HLO instruction.

    Attributes:
      kind: the opcode, without ``-start``, and with the target of a custom call.
      started: whether the instruction starts an asynchronous operation.
      results: the arrays that it produces. Arrays in a tuple are listed separately.
      called: the computations that it runs, or from which it chooses.
      number: the number of a parameter; -1 for other instructions.
    """

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
        """The opcode. For a fusion, also the opcodes that produce its results."""
        inner = [x.kind for x in self.called[0].outputs] if self.kind == "fusion" else []
        return self.kind + "-start" * self.started + ":" * bool(inner) + ",".join(inner)


@dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in scheduled order, and the instructions that produce the results."""

    instructions: tuple[Instruction, ...]
    outputs: tuple[Instruction, ...]


class Program(NamedTuple):
    """All computations, and the entry computation."""

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

_CALLERS = {"while", "conditional", "call", "async"}
_VIEWS = {*_CALLERS, "parameter", "tuple", "get-tuple-element", "bitcast", "opt-barrier"}
_FREE = {"constant", "iota", "after-all", "partition-id", "replica-id"}
_FREE |= {"custom-call:AllocateBuffer"}  # the contents are undefined
_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the index of the operand that they write
# A fusion computes only the part of these results that it uses.
_ELEMENTWISE = {"bitcast-convert", "convert", "copy", "reshape", "transpose", *_UPDATES}


def bytes_moved(text: str, trips: int = 1) -> int:
    """Return the bytes that one run of a program reads from and writes to the device's main memory.

    ``trips`` is the assumed number of iterations of loops whose trip count the text does not give.
    """
    return sum(size for size, _ in bytes_by_instruction(text, trips))


def bytes_by_instruction(text: str, trips: int = 1) -> list[tuple[int, str]]:
    """Return the terms of ``bytes_moved``, largest first: the bytes and a description of each
    instruction."""
    return sorted(_rows(parse_hlo(text).entry, 1, trips), reverse=True)


def large_results(text: str, at_least: int) -> list[str]:
    """Return the arrays of at least ``at_least`` bytes that a program creates in any memory.

    In-place updates don't count. Each entry is the opcode, and the shape with its layout.
    """
    computations = parse_hlo(text).computations
    instructions = [x for computation in computations for x in computation.instructions]
    fused = {called for x in instructions if x.kind not in _CALLERS for called in x.called}
    return [
        f"{instruction.title} {result.text}"[:160]
        for computation in computations
        for instruction in computation.instructions
        if computation not in fused and not _is_view(instruction)
        for result, written in _written(instruction)
        if result.nbytes >= at_least and written is None
    ]


def parse_hlo(text: str) -> Program:
    """Parse the HLO text of a program."""
    computations: dict[str, Computation] = {}
    known: dict[str, Instruction] = {}
    entry = name = root = ""
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            known, name = {}, opened[2]
            entry = name if opened[1] else entry
        elif match := _INSTRUCTION.match(line):
            known[match[2]] = _instruction(match, known, computations)
            root = match[2] if match[1] else root
        elif line.startswith("}"):
            outputs = known[root].operands if known[root].kind == "tuple" else (known[root],)
            computations[name] = Computation(tuple(known.values()), outputs)
    return Program(tuple(computations.values()), computations[entry])


def _instruction(
    line: re.Match[str], known: dict[str, Instruction], computations: dict[str, Computation]
) -> Instruction:
    """Parse an instruction. ``known`` has earlier instructions, and ``computations`` the called
    computations."""
    _, name, shape, opcode, inside, attributes = line.groups()
    kind = opcode.removesuffix("-start")
    operands = tuple(known[operand] for operand in _NAME.findall(inside))
    results = tuple(_result(match) for match in _ARRAY.finditer(shape))
    if started := kind != opcode:
        # The shape lists operands before results, except that for a copy it lists the result first.
        skipped = sum(len(operand.results) for operand in operands) * (kind != "copy")
        created = [x for x in results[skipped:] if not x.text.startswith(("s32[]", "u32[]"))]
        results = tuple(created[:1] if kind == "copy" else created) or results
    called = tuple(computations[x] for x in _NAME.findall(" ".join(_CALLED.findall(attributes))))
    number = int(inside) if kind == "parameter" else -1
    kind = ":".join([kind, *_TARGET.findall(attributes)])
    return Instruction(name, kind, started, results, operands, called, number, attributes)


def _result(match: re.Match[str]) -> Result:
    """Parse the shape of an array."""
    bits = int(match[1] or 8) * math.prod(int(size) for size in re.findall(r"\d+", match[2]))
    memory = re.findall(r"S\((\d+)\)", match[0])
    return Result(match[0], -(-bits // 8), int(memory[0]) if memory else 0)


def _rows(computation: Computation, times: int, trips: int) -> list[tuple[int, str]]:
    """Return the rows of ``bytes_by_instruction`` for a computation that runs ``times`` times."""
    rows: list[tuple[int, str]] = []
    starts = [x for x in computation.instructions if x.started and _PREFETCH not in x.attributes]
    prefetched = {operand for start in starts for operand in start.operands}
    for instruction in computation.instructions:
        if instruction.kind in _CALLERS:
            known = _TRIPS.findall(instruction.attributes) or [trips]
            steps = times * int(known[0]) if instruction.kind == "while" else times
            branches = [_rows(called, steps, trips) for called in instruction.called]
            rows += max(branches, key=lambda rows: sum(size for size, _ in rows))
        # A prefetch for the next run is counted at its start in this run, and not again as a
        # result.
        elif _PREFETCH not in instruction.attributes or prefetched.isdisjoint(instruction.operands):
            words = instruction.title, instruction.name, *(x.text for x in instruction.results)
            rows.append((times * _moved(instruction), " ".join(words)[:160]))
    return [row for row in rows if row[0]]


def _is_view(instruction: Instruction) -> bool:
    """Return whether an instruction moves no bytes itself, because it only renames, waits or calls.

    The compiler keeps reshapes that copy only for tiled arrays.
    """
    if instruction.kind == "reshape":
        return "T(" not in instruction.results[0].text + instruction.operands[0].results[0].text
    return instruction.kind in _VIEWS or instruction.kind.endswith(("-done", "-update"))


def _moved(instruction: Instruction) -> int:
    """Return the bytes that an instruction reads from and writes to main memory."""
    if instruction.kind in _FREE or _is_view(instruction):
        return 0
    moved = 0
    for number, operand in enumerate(instruction.operands):
        in_main = sum(result.nbytes for result in operand.results if not result.memory)
        moved += min(in_main, round(_fraction_read(instruction, number) * operand.nbytes))
    # The last result of a cuBLAS call is its workspace. How much of it the call uses is unknown.
    scratch = instruction.kind.startswith("custom-call:__cublas") and len(instruction.results) > 1
    for result, written in _written(instruction)[: -1 if scratch else None]:
        if not result.memory:
            moved += result.nbytes if written is None else written
    return moved


def _fraction_read(user: Instruction, number: int) -> float:
    """Return the fraction of an operand that an instruction reads."""
    if user.kind in _SLICES and number == 0:
        return user.nbytes / max(user.operands[0].nbytes, 1)
    if user.kind == "tuple" or (user.kind in _UPDATES and number == 0):
        return 0.0
    if user.kind in ("fusion", "call"):
        fused = user.called[0]
        in_place = {x for output in fused.outputs for x in _in_place_chain(output)}
        parameters = [x for x in fused.instructions if x.number == number]
        return sum(_fraction_used(fused, x, in_place) for x in parameters)
    return 1.0


def _fraction_used(fused: Computation, array: Instruction, in_place: set[Instruction]) -> float:
    """Return the fraction of an array that a fused computation reads. It is above 1 if parts are
    read twice."""
    total = float(array in fused.outputs and array not in in_place)
    for user in fused.instructions:
        for number in (n for n, operand in enumerate(user.operands) if operand is array):
            followed = number == 0 and (user.kind in _ELEMENTWISE or _is_alias(user))
            if followed:
                total += _fraction_used(fused, user, in_place)
            else:
                total += _fraction_read(user, number)
    return total


def _written(instruction: Instruction) -> list[tuple[Result, int | None]]:
    """Return the results. For a result that reuses an operand's buffer, also return how many bytes
    are written; otherwise None."""
    written: list[int | None] = [None] * len(instruction.results)
    for number in _aliased(instruction):
        written[number] = instruction.results[number].nbytes * (instruction.kind == "fusion")
    outputs = instruction.called[0].outputs if instruction.kind == "fusion" else (instruction,)
    for number, output in enumerate(outputs if len(outputs) == len(written) else ()):
        chain = [output] if output is instruction else _in_place_chain(output)
        updates = [x.operands[_UPDATES[x.kind]] for x in chain if x.kind in _UPDATES]
        written[number] = sum(x.nbytes for x in updates) if updates else written[number]
    return list(zip(instruction.results, written, strict=True))


def _in_place_chain(output: Instruction) -> list[Instruction]:
    """Return the chain of in-place updates from a parameter of a fused computation to an output;
    empty without such updates."""
    chain = [output]
    while chain[-1].kind in _UPDATES or _is_alias(chain[-1]):
        chain.append(chain[-1].operands[0])
    updated = any(array.kind in _UPDATES for array in chain)
    return chain if updated and chain[-1].kind == "parameter" else []


def _is_alias(fused: Instruction) -> bool:
    """Return whether a fused instruction only renames its operand."""
    if fused.kind != "fusion" or _aliased(fused):
        return fused.kind in {"bitcast", "get-tuple-element", "fusion"}
    return {x.kind for x in fused.called[0].instructions} <= {"bitcast", "parameter"}


def _aliased(instruction: Instruction) -> list[int]:
    """Return the indices of the results that alias an operand of the same size."""
    operands, results = instruction.operands, instruction.results
    pairs = [(int(to or 0), int(by)) for to, by in _ALIAS.findall(instruction.attributes)]
    return [to for to, by in pairs if results[to:] and results[to].nbytes == operands[by].nbytes]


COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "reduce-scatter",
)
# The text lists the devices of a group, or has the size of groups, or names mesh axes.
_GROUP_LIST = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_GROUP_SIZE = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_GROUP_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    """A collective operation.

    Attributes:
      kind: the opcode.
      bytes: the size of a device's result in bytes.
      devices: number of devices that communicate with each other.
    """

    kind: str
    bytes: int
    devices: int

    @property
    def sent(self) -> int:
        """The minimum number of bytes that a device sends if the devices communicate in a ring."""
        others = self.devices - 1
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        if self.kind == "reduce-scatter":
            return others * self.bytes
        twice = 2 if self.kind == "all-reduce" else 1
        return twice * others * self.bytes // max(self.devices, 1)


def collectives(text: str, devices: int = 1) -> list[Collective]:
    """Return the collectives of a compiled program. Each is listed once, no matter how many times
    it runs.

    ``devices`` is the number of devices of the mesh. If the text does not list groups, all devices
    form one group.
    """
    return [
        Collective(instruction.kind, instruction.nbytes, _group_size(instruction, devices))
        for computation in parse_hlo(text).computations
        for instruction in computation.instructions
        if instruction.kind in COLLECTIVES
    ]


def _group_size(instruction: Instruction, devices: int) -> int:
    """Return the number of devices that communicate with each other."""
    attributes = instruction.attributes
    if match := _GROUP_LIST.search(attributes):
        return len(match[1].split(","))
    if match := _GROUP_SIZE.search(attributes):
        return int(match[1])
    if match := _GROUP_AXES.search(attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])  # an axis may be split
        return math.prod(int(part or sizes[name]) for name, part in axes)
    return devices
