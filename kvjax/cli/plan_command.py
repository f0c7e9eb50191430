"""``kvjax plan``: the memory of a model and its cache, and what fits, without loading anything."""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from jax.sharding import AbstractMesh

from kvjax.cli import options
from kvjax.cli.common import check_dtype, known_shape, use_compilation_cache
from kvjax.cli.options import cache_policy
from kvjax.cli.output import bytes_by_place, context_warning, echo_json, show_progress
from kvjax.core.reporting import parse_bytes, readable_bytes, report_progress
from kvjax.core.target import Target, device_spec
from kvjax.memory.device_plan import DevicePlan
from kvjax.memory.limits import DEFAULT_CHOICES, CacheFit
from kvjax.memory.planning import Plan
from kvjax.memory.shapes import ModelShape
from kvjax.memory.sizes import Plannable
from kvjax.placement.device import Device
from kvjax.placement.mesh import AXES, make_mesh, parse_mesh
from kvjax.policies.presets import PolicyChoice, policy


def plan(
    *,
    model: options.Model = None,
    revision: options.Revision = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A config.json of any decoder, also of one that kvjax does not run."),
    ] = None,
    shape: options.KnownShape = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16; by default the dtype in which --model is loaded "
            "here, or the config's own with --config, --memory or --mesh."
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Number of rows.")] = 1,
    max_len: Annotated[
        int | None, typer.Option(help="Tokens per row; by default what the model was trained for.")
    ] = None,
    cache: options.Cache = "static",
    quantization: options.Quantization,
    sliding_window: options.SlidingWindow,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of the device: 80GiB, 40GB. Shows what fits into it."),
    ] = None,
    memory_fraction: Annotated[
        float,
        typer.Option(help="Fraction of the memory left by weights and temporaries for the cache."),
    ] = 1.0,
    devices: Annotated[
        int, typer.Option(help="Number of devices that share weights and heads evenly.")
    ] = 1,
    mesh: Annotated[
        str | None, typer.Option(help="Plan for devices that share the work: data=2,tensor=4.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Compile with this device's compiler, also if there is no such device here: t4, "
            "l4, a100, h100, h200, b200, v5e, v6e, v7x and others."
        ),
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Estimate temporaries instead of compiling a step.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Plan the memory of a model and its cache from the config alone, and show what fits."""
    use_compilation_cache()
    if device is not None and jax.config.values["jax_platforms"] is None:
        jax.config.update("jax_platforms", "cpu")  # local accelerators are not needed
    import kvjax
    from kvjax.memory.planning import beyond_context

    if sum(x is not None for x in (model, config, shape)) > 1 or (revision and not model):
        raise ValueError("give one of --model (with its --revision), --config and --shape")
    # With --memory, --mesh or --device, the plan is for devices that may not be attached.
    local = memory is None and mesh is None and config is None and device is None
    target = Device().target() if local else Target("elsewhere")
    if device is not None:
        target = device_spec(device).target
    plannable, context = _read_model(model, revision, config, shape, dtype, target)
    name = str(model or config or shape or "the embedded model")
    max_len = context if max_len is None else max_len
    if max_len is None:
        raise ValueError("the config does not limit the text's length: give --max-len")
    automatic = cache.split(",")[0].strip() == "auto"
    if device is not None:
        if memory is not None or devices != 1 or estimate or memory_fraction != 1.0:
            raise ValueError(
                "--device has its own memory and compiler: omit --memory, --memory-fraction, "
                "--devices and --estimate"
            )
        if automatic:
            raise ValueError(
                "--cache auto moves layers at run time, which --device can't plan: give one of the "
                "policies that it chooses from"
            )
    abstract_mesh = None if mesh is None else _abstract_mesh(mesh)
    what_fits = functools.partial(
        kvjax.memory.what_fits,
        plannable,
        batch=batch,
        max_len=max_len,
        fraction=memory_fraction,
        memory=None if memory is None else parse_bytes(memory),
        devices=devices,
    )
    budget = None
    if automatic:
        if memory is None:
            raise ValueError("--cache auto needs the memory of the device: give --memory")
        budget = devices * what_fits()[0].allowed
    settings: dict[str, Any] = quantization.settings() | sliding_window.settings()
    is_default = cache == "static" and all(value is None for value in settings.values())
    chosen = cache_policy(cache, quantization, sliding_window, memory=budget)
    if device is not None:
        choices = None if is_default else {"this one": chosen}
        _plan_for_device(plannable, name, device, mesh, choices, batch, max_len, as_json)
        if excess := beyond_context(plannable.config, max_len):
            typer.echo(context_warning(excess), err=True)
        return
    if abstract_mesh is not None and (memory is not None or devices != 1):
        raise ValueError("--mesh plans for each device: omit --memory and --devices")
    with show_progress("planning"):
        result = kvjax.plan(
            plannable,
            chosen,
            batch=batch,
            max_len=max_len,
            mesh=abstract_mesh,
            compiled=not (estimate or config),
        )
    fits = None
    if memory is not None:
        # An automatic cache fits any memory.
        fits = what_fits(policies=None if is_default or automatic else {"this one": chosen})
    elif devices != 1 or memory_fraction != 1.0:
        raise ValueError("--devices and --memory-fraction need --memory")
    if result.beyond_context:
        typer.echo(context_warning(result.beyond_context), err=True)
    if as_json:
        report: dict[str, Any] = {"model": name, "plan": dataclasses.asdict(result)}
        if fits is not None:
            report["fits"] = [dataclasses.asdict(fit) | {"fits": fit.fits} for fit in fits]
        echo_json(report)
        return
    per_device = "" if mesh is None else f", on each of {result.devices} devices ({mesh})"
    typer.echo(f"{name} in {plannable.config.dtype}, {batch} x {max_len:,} tokens{per_device}\n")
    _print_plan(result)
    if fits is not None:
        per_device = f" on each of {devices} devices" if devices > 1 else ""
        typer.echo(f"\n{memory} of memory{per_device}:\n")
        _print_fits(fits)


def _print_plan(plan: Plan) -> None:
    from kvjax.quality import reports

    rows = {
        "weights": readable_bytes(plan.weights),
        "cache": bytes_by_place(plan.cache),
        "  per token of a row": bytes_by_place(plan.bytes_per_token),
        f"temporaries ({plan.source})": readable_bytes(plan.temporaries),
        "device, total": readable_bytes(plan.device),
        f"a step after {plan.length:,} tokens": "",
        "  operations": f"{plan.flops:.3g}",
        "  without a cache": f"{plan.flops_uncached:.3g}",
        "  bytes read": readable_bytes(plan.bytes_read),
    }
    typer.echo(reports.format_columns([*rows.items()]))


def _print_fits(fits: list[CacheFit]) -> None:
    """Print a table of the policies, and of the largest batch and the longest text that fit."""
    from kvjax.quality import reports

    def limit(value: int | None) -> str:
        return "no limit" if value is None else f"{value:,}"

    rows = [["cache", "size", "budget", "", "largest batch", "longest text", "on the host"]]
    for fit in fits:
        rows.append(
            [
                fit.name,
                readable_bytes(fit.cache),
                readable_bytes(fit.allowed),
                "fits" if fit.fits else "too large",
                limit(fit.largest_batch),
                limit(fit.largest_len),
                readable_bytes(fit.host) if fit.host else "-",
            ]
        )
    typer.echo(reports.format_columns(rows))


def _abstract_mesh(value: str) -> AbstractMesh:
    """Return the mesh of ``--mesh`` as an abstract mesh, which has no devices."""
    if value == "auto":
        raise ValueError("--mesh auto depends on local devices: give a size, such as tensor=4")
    sizes = parse_mesh(value)
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)


def _read_model(
    model: str | None,
    revision: str | None,
    config: Path | None,
    shape: str | None,
    dtype: str | None,
    target: Target,
) -> tuple[Plannable, int | None]:
    """Return the model to plan for, and its training context in tokens.

    If kvjax can run the model, its config is read in the same way as by ``load``.
    """
    from kvjax.models.architecture import Architecture
    from kvjax.models.files import Fields, read_json
    from kvjax.models.hub import locate
    from kvjax.models.loading import compute_dtype, read_config
    from kvjax.models.multimodal import is_read

    check_dtype(dtype)
    loadable = None
    if config is not None and is_read(Fields(config, read_json(config))):
        loadable = read_config(config)
    elif config is None and shape is None:
        loadable = read_config(locate(model, revision))
    if loadable is not None:
        loadable = dataclasses.replace(loadable, dtype=loadable.dtype or "bfloat16")
        computed = compute_dtype(loadable, dtype, target)
        return Architecture(dataclasses.replace(loadable, dtype=computed)), loadable.context
    numbers = ModelShape.from_config(read_json(config)) if config else known_shape(str(shape))
    if dtype is None and numbers.dtype == "bfloat16" and target.before_ampere:
        dtype = "float16"
    numbers = dataclasses.replace(numbers, dtype=dtype or numbers.dtype)
    return numbers, numbers.context


def _plan_for_device(
    model: Plannable,
    name: str,
    device: str,
    mesh: str | None,
    choices: dict[str, PolicyChoice] | None,
    batch: int,
    max_len: int,
    as_json: bool,
) -> None:
    """Plan with the compiler of a device, and print a row for each policy.

    ``mesh`` plans for a mesh of such devices. ``choices`` has policies by name. By default they are
    the policies that ``what_fits`` compares, except the one on the host.
    """
    from kvjax.memory.device_plan import plan_on

    if choices is None:
        defaults: dict[str, Any] = {title: policy(**it) for title, it in DEFAULT_CHOICES.items()}
        choices = {k: each for k, each in defaults.items() if not each.placement.needs_tail}
    target: Any = device if mesh is None else make_mesh(**parse_mesh(mesh), devices=device)
    plans: dict[str, DevicePlan] = {}
    with show_progress("planning"):
        for number, (title, choice) in enumerate(choices.items()):
            report_progress(f"planning {title}", number, len(choices))
            plans[title] = plan_on(model, choice, device=target, batch=batch, max_len=max_len)
    if as_json:
        entries = {
            title: dataclasses.asdict(plan)
            | {"total": plan.total, "fits": plan.fits, "seconds": plan.seconds}
            for title, plan in plans.items()
        }
        echo_json({"model": name, "device": device, "mesh": mesh, "plans": entries})
        return
    first = next(iter(plans.values()))
    memory = "" if first.memory is None else f" with {readable_bytes(first.memory)}"
    per_device = "" if mesh is None else f"; figures are for each of {first.devices} ({mesh})"
    typer.echo(
        f"{name} in {model.config.dtype}, {batch} x {max_len:,} tokens, compiled ahead of time for "
        f"{first.device}{memory}; nothing was executed{per_device}\n"
    )
    _print_device_plans(plans)
    if sentence := _too_large(plans, divisible=model.apply is not None):
        typer.echo(f"\n{sentence}")


def _print_device_plans(plans: dict[str, DevicePlan]) -> None:
    from kvjax.quality import reports

    head = [
        "cache", "weights", "cache", "temporaries", "code", "total", "",
        "step traffic", "ideal", "at least", "sends",
    ]  # fmt: skip
    rows = [
        [
            title,
            readable_bytes(plan.weights),
            bytes_by_place(plan.cache),
            readable_bytes(plan.temporaries),
            readable_bytes(plan.code),
            readable_bytes(plan.total),
            {True: "fits", False: "too large", None: ""}[plan.fits],
            readable_bytes(plan.bytes_moved),
            readable_bytes(plan.min_bytes_moved),
            "" if plan.seconds is None else f"{1000 * plan.seconds:.1f} ms",
            readable_bytes(plan.bytes_sent),
        ]
        for title, plan in plans.items()
    ]
    single = all(plan.devices == 1 for plan in plans.values())
    typer.echo(reports.format_columns([row[:-1] if single else row for row in (head, *rows)]))


def _too_large(plans: dict[str, DevicePlan], divisible: bool) -> str:
    """Return a sentence that says why some caches do not fit; empty if all fit.

    ``divisible`` says whether the model can be divided among devices.
    """
    large = [title for title, plan in plans.items() if plan.fits is False]
    if not large:
        return ""
    plan = plans[large[0]]
    assert plan.memory is not None
    names = "all of these" if len(large) == len(plans) > 1 else ", ".join(large)
    device = "each device" if plan.devices > 1 else "the device"
    start = f"Too large: {names}. The memory of {device} is {readable_bytes(plan.memory)}"
    weights = readable_bytes(plan.weights)
    if plan.weights >= plan.memory:
        option = "--mesh tensor=..." if divisible else "--mesh, with --model or --config"
        return f"{start}, less than the weights ({weights}): divide them among devices ({option})."
    left = readable_bytes(plan.memory - plan.weights)
    return (
        f"{start}; the weights take {weights}, which leaves {left} for the cache, temporaries and "
        "code."
    )
