"""``kvjax plan --device``: what a device's own compiler says of some caches, a row each."""

import dataclasses
from typing import Any

import typer

from kvjax.cli.output import by_place
from kvjax.cli.progress import shown
from kvjax.cli.streams import echo_json
from kvjax.core.reporting import readable_bytes, report_progress


def on_device(
    planned: Any,
    name: str,
    device: str,
    mesh: str | None,
    choices: dict[str, Any] | None,
    batch: int,
    max_len: int,
    as_json: bool,
) -> None:
    """Plan for a kind of device, or a mesh of such, and print it. ``choices``: policies by name,
    by default those that plans compare."""
    from kvjax.memory.device_plan import DevicePlan, plan_on
    from kvjax.memory.limits import DEFAULT_CHOICES
    from kvjax.placement.mesh import make_mesh, parse_mesh
    from kvjax.policies.presets import policy

    if choices is None:
        every: dict[str, Any] = {title: policy(**it) for title, it in DEFAULT_CHOICES.items()}
        # Bodies on the host are compiled for when they are asked for.
        choices = {k: each for k, each in every.items() if not each.placement.needs_tail}
    there: Any = device if mesh is None else make_mesh(**parse_mesh(mesh), devices=device)
    found: dict[str, DevicePlan] = {}
    with shown("planning"):
        for number, (title, choice) in enumerate(choices.items()):
            report_progress(f"planning {title}", number, len(choices))
            found[title] = plan_on(planned, choice, device=there, batch=batch, max_len=max_len)
    if as_json:
        plans = {
            title: dataclasses.asdict(plan)
            | {"whole": plan.whole, "fits": plan.fits, "seconds": plan.seconds}
            for title, plan in found.items()
        }
        echo_json({"model": name, "device": device, "mesh": mesh, "plans": plans})
        return
    one = next(iter(found.values()))
    memory = "" if one.memory is None else f" with {readable_bytes(one.memory)}"
    shared = "" if mesh is None else f", all of each of {one.devices} ({mesh})"
    typer.echo(
        f"{name} in {planned.config.dtype}, {batch} x {max_len:,} tokens, compiled for "
        f"{one.device}{memory}, of which nothing ran{shared}\n"
    )
    typer.echo(_table(found))
    if sentence := _too_large(found, planned.apply is not None):
        typer.echo(f"\n{sentence}")


def _table(found: dict[str, Any]) -> str:
    """A row a cache."""
    from kvjax.quality import reports

    head = ["cache", "weights", "cache", "temporaries", "code", "in all", "",
            "a step moves", "ideal", "at least", "and sends"]  # fmt: skip
    rows = [
        [
            each, readable_bytes(plan.weights), by_place(plan.cache),
            readable_bytes(plan.temporaries), readable_bytes(plan.code),
            readable_bytes(plan.whole), {True: "fits", False: "too large", None: ""}[plan.fits],
            readable_bytes(plan.moved), readable_bytes(plan.ideal),
            "" if plan.seconds is None else f"{1000 * plan.seconds:.1f} ms",
            readable_bytes(plan.sent),
        ]
        for each, plan in found.items()
    ]  # fmt: skip
    alone = all(plan.devices == 1 for plan in found.values())
    return reports.format_columns([row[:-1] if alone else row for row in (head, *rows)])


def _too_large(found: dict[str, Any], divides: bool) -> str:
    """Why some caches do not fit, in a sentence; empty where all do. ``divides``: whether the model
    can be divided among devices."""
    large = [each for each, plan in found.items() if plan.fits is False]
    if not large:
        return ""
    plan = found[large[0]]
    each = "each" if plan.devices > 1 else "it"
    has = f"{each} has {readable_bytes(plan.memory)}, and the weights"
    of = "all of these" if len(large) == len(found) > 1 else ", ".join(large)
    if plan.weights >= plan.memory:
        how = "--mesh tensor=..." if divides else "--mesh, with --model or --config"
        return (
            f"Too large, {of}: {has} alone take {readable_bytes(plan.weights)}; more devices "
            f"divide them ({how})."
        )
    left = readable_bytes(plan.memory - plan.weights)
    return (
        f"Too large, {of}: {has} take {readable_bytes(plan.weights)}, which leaves {left} to the "
        "cache, temporaries and code."
    )
