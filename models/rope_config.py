"""What ``config.json`` says of rotary positions, in any of the forms it has had."""

from dataclasses import dataclass

from .config import Parameter, RopeConfig
from .fields import Fields

KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
"""The kinds of rotary positions that Transformers has for most families here."""


@dataclass(frozen=True)
class RopeForm:
    """How a family's files tell of rotary positions.

    ``base``: what ``rope_theta`` is called outside of the parameters, and ``theta`` its default;
    ``part``: the same of ``partial_rotary_factor``, and ``partial``. ``partial_default``: whether
    the kind ``default`` goes by it. ``kinds``: those that the family has, ``older`` the names that
    one of them had. ``trained``: the length before scaling, where nothing beside the parameters
    says it; None where it may stand inside.
    """

    base: str = "rope_theta"
    theta: float = 1e4
    part: str = "partial_rotary_factor"
    partial: float = 1.0
    partial_default: bool = False
    kinds: tuple[str, ...] = KINDS
    older: tuple[tuple[str, str], ...] = ()
    trained: int | None = None


FULL, LOCAL = RopeForm(theta=1e6), RopeForm("rope_local_base_freq")
"""Of Gemma 3's full and sliding layers."""


def read_rope(
    config: Fields, form: RopeForm, *, head_dim: int, max_position_embeddings: int
) -> RopeConfig:
    """Read ``rope_parameters``, or its older forms ``rope_scaling`` and ``rope_theta``.

    As in Transformers, ``rope_scaling`` goes before ``rope_parameters``, and ``rope_theta``,
    ``partial_rotary_factor`` inside them before those beside them. A length before scaling that
    stands outside goes before the one inside.

    Raises:
      CheckpointError: if the kind is not known, or a parameter is missing or of a wrong form.
    """
    rope = _rope_fields(config)
    name = "original_max_position_embeddings"
    outside = form.trained is not None or config.raw(name) is not None
    return _read(config, rope, form, outside, head_dim, max_position_embeddings)


def read_ropes(
    config: Fields,
    full_form: RopeForm,
    local_form: RopeForm,
    *,
    head_dim: int,
    max_position_embeddings: int,
    full_head_dim: int | None = None,
) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary positions of full and of sliding layers, where these are not the same.

    ``full_head_dim``: of full layers, where they have another one.

    They stand in ``rope_parameters`` under ``full_attention`` and ``sliding_attention``. The older
    form has ``rope_theta`` and ``rope_scaling`` for full layers and ``rope_local_base_freq`` for
    sliding ones, which are never scaled.

    Raises:
      CheckpointError: if a kind is not known, or a parameter is missing or of a wrong form.
    """
    both = config.inner("rope_parameters") or Fields(config.file, {}, "rope_parameters.")
    for name in both.values:
        if name not in ("full_attention", "sliding_attention"):
            raise both.wrong(name, "nothing beside full_attention and sliding_attention")
    full = _inner(both, "full_attention")
    if (scaling := _inner(config, "rope_scaling")).values:
        if full.values:
            raise config.wrong("rope_scaling", "null beside rope_parameters.full_attention")
        # Which of two names counts is not the same in every Transformers.
        if scaling.raw("rope_type") is None:
            raise scaling.wrong("rope_type", f"one of {', '.join(KINDS)}")
        full = scaling
    local, positions = _inner(both, "sliding_attention"), max_position_embeddings
    return (
        _read(config, full, full_form, False, full_head_dim or head_dim, positions),
        _read(config, local, local_form, False, head_dim, positions),
    )


def _inner(fields: Fields, name: str) -> Fields:
    return fields.inner(name) or Fields(fields.file, {}, f"{fields.parent}{name}.")


def _read(
    config: Fields,
    rope: Fields,
    form: RopeForm,
    outside: bool,
    head_dim: int,
    max_position_embeddings: int,
) -> RopeConfig:
    """One set of parameters. ``outside``: whether the length before scaling stands there."""
    kind = _kind(rope, form)
    inside = rope.raw("rope_theta") is not None
    theta = rope.number("rope_theta") if inside else config.number(form.base, form.theta)
    outer = config.number(form.part, form.partial)
    # Transformers' `default` kind of most families rotates all channels, whatever this says.
    whole = kind == "default" and not form.partial_default
    partial = 1.0 if whole else rope.number("partial_rotary_factor", outer)
    if kind == "proportional" and partial > 1:
        raise rope.wrong("partial_rotary_factor", "a number above 0, and at most 1")
    result = RopeConfig(kind, theta, partial)
    dim = result.rotary_dim(head_dim)
    if dim < 2 or dim % 2 or dim > head_dim:
        where = config if "head_dim" in config.values else rope
        name = "head_dim" if where is config else "partial_rotary_factor"
        raise where.wrong(
            name, f"an even number of rotated channels, at most head_dim = {head_dim}, not {dim}"
        )
    parameters = _parameters(kind, rope, dim)
    if kind in ("llama3", "yarn", "longrope"):
        name = "original_max_position_embeddings"
        default = form.trained or max_position_embeddings
        parameters[name] = (config if outside else rope).integer(name, default)
    return RopeConfig(kind, theta, partial, tuple(sorted(parameters.items())))


def _rope_fields(config: Fields) -> Fields:
    for name in ("rope_scaling", "rope_parameters"):
        fields = config.inner(name)
        if fields is not None and fields.values:
            if nested := [key for key in fields.values if key.endswith("_attention")]:
                raise fields.wrong(nested[0], "one set of rotary parameters for all layers")
            return fields
    return Fields(config.file, {}, "rope_parameters.")


def _kind(rope: Fields, form: RopeForm) -> str:
    name = "rope_type" if rope.raw("rope_type") is not None else "type"
    older = dict(form.older)
    found = rope.choice(name, "default", (*form.kinds, *older))
    return older.get(found, found)


def _parameters(kind: str, rope: Fields, dim: int) -> dict[str, Parameter]:
    """The kind's own parameters; those that the kind does not read are left out."""
    if kind == "default":
        return {}
    if kind == "dynamic" and dim < 4:
        raise rope.wrong("rope_type", f"another kind: dynamic needs 4 rotated channels, not {dim}")
    if kind == "longrope":
        parameters: dict[str, Parameter] = {
            name: rope.numbers(name, dim // 2) for name in ("long_factor", "short_factor")
        }
        optional = ("factor", "attention_factor")
    elif kind == "yarn":
        if "factor" not in rope.values:
            raise rope.wrong("factor", "a number above 0")
        parameters = {"truncate": rope.flag("truncate", True)}
        optional = (
            "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        )  # fmt: skip
    else:
        parameters = {} if kind == "proportional" else {"factor": rope.number("factor")}
        optional = ("factor",) if kind == "proportional" else ()
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            parameters[name] = rope.number(name)
    for name in optional:
        if rope.raw(name) is not None:
            parameters[name] = rope.number(name, positive=name == "factor")
    return parameters
