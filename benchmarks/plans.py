"""The tables of ``docs/memory.md``: ``python -m benchmarks.plans`` writes them anew."""

from collections.abc import Mapping
from pathlib import Path

import kvjax
from kvjax.core.reporting import readable_bytes
from kvjax.memory.planning import plan
from kvjax.memory.shapes import SHAPES, ModelShape

PAGE = Path(__file__).resolve().parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- python -m benchmarks.plans -->\n", "<!-- end -->\n"
BITS = {"16 bits": {}, "8": {"bits": 8}, "4": {"bits": 4}, "2": {"bits": 2}}
MEMORIES = {
    "llama-135m": (16 * 10**9, 1),
    "llama-3-8b": (80 * 10**9, 1),
    "llama-3.1-8b": (80 * 10**9, 1),
    "llama-3.1-70b": (80 * 10**9, 4),
    "llama-3.2-1b": (16 * 10**9, 1),
    "llama-3.2-3b": (16 * 10**9, 1),
    "qwen3-0.6b": (16 * 10**9, 1),
    "qwen3-8b": (80 * 10**9, 1),
    "gemma-3-1b": (16 * 10**9, 1),
    "gemma-3-4b": (16 * 10**9, 1),
    "mistral-7b": (24 * 10**9, 1),
    "gpt2": (16 * 10**9, 1),
    "llama-65b": (40 * 10**9, 8),
    "gpt-neox-20b": (80 * 10**9, 1),
    "gpt-3-175b": (80 * 10**9, 8),
}
"""Bytes of a device, and how many devices."""
FRACTION = 0.9


def tables(shapes: Mapping[str, ModelShape] = SHAPES) -> str:
    """All of them, in Markdown."""
    return "\n".join([_sizes(shapes), "", _operations(shapes), "", _rooms(shapes), ""])


def _sizes(shapes: Mapping[str, ModelShape]) -> str:
    rows = [
        "| model | weights | per token, 16 bits | 8 bits | 4 bits | 2 bits | one full context |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, shape in shapes.items():
        plans = [
            plan(shape, kvjax.policy(**bits), max_len=shape.context or 1, compiled=False)
            for bits in BITS.values()
        ]
        tokens = " | ".join(readable_bytes(p.bytes_per_token["device"]) for p in plans)
        whole = readable_bytes(plans[0].cache["device"])
        rows.append(
            f"| {name} | {readable_bytes(plans[0].weights)} | {tokens} | "
            f"{shape.context:,} tokens, {whole} |"
        )
    return "\n".join(rows)


def _operations(shapes: Mapping[str, ModelShape]) -> str:
    rows = [
        "| one token after | operations | operations without a cache | bytes read "
        "| bytes read without a cache |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, shape in shapes.items():
        found = plan(shape, max_len=shape.context or 1, compiled=False)
        rows.append(
            f"| {name}, {found.length:,} tokens | {found.flops:.2g} | "
            f"{found.flops_uncached:.2g} | {readable_bytes(found.bytes_read)} | "
            f"{readable_bytes(found.bytes_read_uncached)} |"
        )
    return "\n".join(rows)


def _rooms(shapes: Mapping[str, ModelShape]) -> str:
    names = list(BITS)
    rows = [
        f"| full contexts in {FRACTION:.0%} of the remaining memory | {' | '.join(names)} |",
        "| --- |" + " --- |" * len(names),
    ]
    for name, shape in shapes.items():
        memory, devices = MEMORIES[name]
        rooms = kvjax.memory.what_fits(
            shape, max_len=shape.context or 1, memory=memory, devices=devices, fraction=FRACTION,
            policies={bits: kvjax.policy(**it) for bits, it in BITS.items()},
        )  # fmt: skip
        device = f"{devices} x {readable_bytes(memory)}" if devices > 1 else readable_bytes(memory)
        each = " | ".join(f"{room.largest_batch:,}" for room in rooms)
        rows.append(f"| {name}, {device} | {each} |")
    return "\n".join(rows)


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END, 1)[1]
    PAGE.write_text(before + BEGIN + "\n" + tables() + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
