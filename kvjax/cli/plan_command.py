"""``kvjax plan``: what a model and its cache take, and what fits, before anything is loaded."""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from jax.sharding import AbstractMesh

from kvjax.cli import options
from kvjax.cli.common import check_dtype, known_shape, use_compilation_cache
from kvjax.cli.device_plan import on_device
from kvjax.cli.output import beyond, by_place
from kvjax.cli.progress import shown
from kvjax.cli.streams import echo_json
from kvjax.core.reporting import parse_bytes, readable_bytes
from kvjax.core.target import Target, device_spec
from kvjax.memory.shapes import ModelShape
from kvjax.placement.device import Device
from kvjax.placement.mesh import AXES, parse_mesh
from kvjax.policies.presets import parse_policy


def plan(
    model: options.Model = None,
    revision: options.Revision = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A config.json of any decoder, instead of a model that kvjax runs."),
    ] = None,
    shape: options.KnownShape = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16; by default what --model is loaded in here, and "
            "with --config, --memory or --mesh the config's own."
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Rows.")] = 1,
    max_len: Annotated[
        int | None, typer.Option(help="Tokens a row; by default what the model was trained for.")
    ] = None,
    cache: options.Cache = "static",
    kv_bits: options.Bits = None,
    key_bits: options.KeyBits = None,
    value_bits: options.ValueBits = None,
    group_size: options.Group = None,
    window: options.Window = None,
    sinks: options.Sinks = None,
    memory: Annotated[
        str | None, typer.Option(help="Of a device: 80GiB, 40GB. Shows what fits into it.")
    ] = None,
    memory_fraction: Annotated[
        float, typer.Option(help="What the cache may take of what weights and temporaries leave.")
    ] = 1.0,
    devices: Annotated[int, typer.Option(help="How many share weights and heads evenly.")] = 1,
    mesh: Annotated[
        str | None, typer.Option(help="Plan for devices that share the work: data=2,tensor=4.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Ask this device's own compiler, whether it is here or not: t4, l4, a100, h100, "
            "h200, b200, v5e, v6e, v7x and others."
        ),
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Estimate temporaries instead of compiling a step.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Say what a model and its cache take, from the config alone, and what fits into a memory."""
    use_compilation_cache()
    if device is not None and jax.config.values["jax_platforms"] is None:
        jax.config.update("jax_platforms", "cpu")  # devices that are here are not asked
    import kvjax
    from kvjax.memory.planning import beyond_context, plan
    from kvjax.quality import reports

    if sum(x is not None for x in (model, config, shape)) > 1 or (revision and not model):
        raise ValueError("give one of --model (with its --revision), --config and --shape")
    # A memory or a mesh is of devices that need not be here: weights are what the checkpoint has.
    here = memory is None and mesh is None and config is None and device is None
    target = Device().target() if here else Target("elsewhere")
    if device is not None:
        target = device_spec(device).target
    planned, trained = _planned(model, revision, config, shape, dtype, target)
    name = str(model or config or shape or "the embedded model")
    max_len = trained if max_len is None else max_len
    if max_len is None:
        raise ValueError("the config does not say how long a text may be: give --max-len")
    if device is not None:
        if memory is not None or devices != 1 or estimate or memory_fraction != 1.0:
            raise ValueError(
                "--device has a memory and a compiler of its own: give it without --memory, "
                "--memory-fraction, --devices and --estimate"
            )
        if cache.split(",")[0].strip() == "auto":
            raise ValueError(
                "--cache auto moves layers while it runs: with --device give what it chooses among"
            )
    shared = None if mesh is None else _abstract(mesh)
    fits = functools.partial(
        kvjax.memory.what_fits, planned, batch=batch, max_len=max_len, fraction=memory_fraction,
        memory=None if memory is None else parse_bytes(memory), devices=devices,
    )  # fmt: skip
    room = None
    automatic = cache.split(",")[0].strip() == "auto"
    if automatic:
        if memory is None:
            raise ValueError("--cache auto keeps to a memory: give --memory, that of the device")
        room = devices * fits()[0].allowed
    settings = {"bits": kv_bits, "key_bits": key_bits, "value_bits": value_bits,
                "group": group_size, "window": window, "sinks": sinks}  # fmt: skip
    chosen = parse_policy(cache, **settings, memory=room)
    special = cache != "static" or any(x is not None for x in settings.values())
    if device is not None:
        choices = {"this one": chosen} if special else None
        on_device(planned, name, device, mesh, choices, batch, max_len, as_json)
        if over := beyond_context(planned.config, max_len):
            typer.echo(beyond(over), err=True)
        return
    if shared is not None and (memory is not None or devices != 1):
        raise ValueError("--mesh shows what a device has: give it without --memory and --devices")
    with shown("planning"):
        found = plan(
            planned, chosen, batch=batch, max_len=max_len, mesh=shared,
            compiled=not (estimate or config),
        )  # fmt: skip
    rooms = None
    if memory is not None:
        # An automatic cache fits whatever it is given.
        rooms = fits(choices={"this one": chosen} if special and not automatic else None)
    elif devices != 1 or memory_fraction != 1.0:
        raise ValueError("--devices and --memory-fraction are for --memory: give it")
    if found.beyond_context:
        typer.echo(beyond(found.beyond_context), err=True)
    if as_json:
        report: dict[str, Any] = {"model": name, "plan": dataclasses.asdict(found)}
        if rooms is not None:
            report["fits"] = [dataclasses.asdict(room) | {"fits": room.fits} for room in rooms]
        echo_json(report)
        return
    each = "" if mesh is None else f", on each of {found.devices} devices ({mesh})"
    typer.echo(f"{name} in {planned.config.dtype}, {batch} x {max_len:,} tokens{each}\n")
    rows = {
        "weights": readable_bytes(found.weights),
        "cache": by_place(found.cache),
        "  a token of a row": by_place(found.token),
        f"temporaries ({found.source})": readable_bytes(found.temporaries),
        "device, in all": readable_bytes(found.device),
        f"a step behind {found.length:,} tokens": "",
        "  operations": f"{found.operations:.3g}",
        "  without a cache": f"{found.operations_uncached:.3g}",
        "  bytes read": readable_bytes(found.moved),
    }
    typer.echo(reports.format_columns([*rows.items()]))
    if rooms is not None:
        each = f" on each of {devices} devices" if devices > 1 else ""
        typer.echo(f"\n{memory} of memory{each}:\n")
        typer.echo(reports.format_columns(_room_rows(rooms)))


def _abstract(words: str) -> Any:
    """A mesh of devices that need not be here."""
    if words == "auto":
        raise ValueError(
            "--mesh auto goes by the devices that are here: plan for so many, tensor=4"
        )
    return AbstractMesh(tuple(parse_mesh(words).get(axis, 1) for axis in AXES), AXES)


def _planned(
    model: str | None,
    revision: str | None,
    config: Path | None,
    shape: str | None,
    dtype: str | None,
    target: Target,
) -> tuple[Any, int | None]:
    """What is planned for, and the length that it was trained for. A config that kvjax runs is read
    as ``load`` reads it."""
    from kvjax.models.architecture import Architecture
    from kvjax.models.config_json import read_config
    from kvjax.models.fields import Fields, read_json
    from kvjax.models.hub import locate
    from kvjax.models.loading import compute_dtype
    from kvjax.models.multimodal import is_read

    check_dtype(dtype)
    found = None
    if config is not None and is_read(Fields(config, read_json(config))):
        found = read_config(config)
    elif config is None and shape is None:
        found = read_config(locate(model, revision))
    if found is not None:
        found = dataclasses.replace(found, dtype=found.dtype or "bfloat16")
        computed = compute_dtype(found, dtype, target)
        return Architecture(dataclasses.replace(found, dtype=computed)), found.context
    alone = ModelShape.from_config(read_json(config)) if config else known_shape(str(shape))
    if dtype is None and alone.dtype == "bfloat16" and target.before_ampere:
        dtype = "float16"
    alone = dataclasses.replace(alone, dtype=dtype or alone.dtype)
    return alone, alone.context


def _room_rows(rooms: list[Any]) -> list[list[str]]:
    def number(value: int | None) -> str:
        return "no end" if value is None else f"{value:,}"

    head = ["cache", "takes", "may take", "", "largest batch", "longest text", "and of the host"]
    body = [
        [
            room.name, readable_bytes(room.cache), readable_bytes(room.allowed),
            "fits" if room.fits else "too large", number(room.largest_batch),
            number(room.largest_len), readable_bytes(room.host) if room.host else "-",
        ]
        for room in rooms
    ]  # fmt: skip
    return [head, *body]
