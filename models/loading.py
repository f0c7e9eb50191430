"""Load a checkpoint: a folder, a model of the Hugging Face hub, or the embedded model."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvjax.core.array_folder import expand_user
from kvjax.core.target import Target, default_device
from kvjax.core.validation import ArgumentError, CheckpointError
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import GenerationDefaults
from kvjax.memory.limits import auto_mesh
from kvjax.placement.device import Device

from . import weights
from .architecture import Architecture
from .config import DTYPES, Config
from .config_fields import FAMILIES, ModelType
from .config_json import read_config
from .files import Fields, Stored, find_tensors, read_json, weight_files
from .multimodal import other_part, read_text_fields, skipped, take_text
from .text import read_tokenizer
from .weights import Params

MeshChoice = Mesh | Literal["auto"] | None
_WIDE = "gemma2", "gemma3", "gemma4", "t5"
"""Prefixes of ``model_type`` whose activations exceed the range of float16."""


def load(
    path_or_id: str | Path | None = None,
    *,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
    mesh: MeshChoice = "auto",
) -> LanguageModel:
    """Load a model, its tokenizer and its settings.

    Weights are read from safetensors, one tensor at a time, so peak memory is only a little above
    the size of the model. Nothing is unpickled, and no code of the checkpoint runs. Only the text
    part of a multimodal model is loaded. A line on stderr names what was skipped, and files without
    text weights are not downloaded. float64 weights are read as float32, with a line on stderr.

    Args:
      path_or_id: a folder in the Transformers format, a hub id (``owner/name``), or None for the
        model that comes with the package.
      dtype: the dtype of computation: float32, bfloat16 or float16. By default float32 on a CPU,
        and the checkpoint's dtype on an accelerator. On a GPU without bfloat16 (a T4), a bfloat16
        checkpoint is computed in float16, or in float32 if its weights, or the activations of its
        family, exceed the range of float16. A line on stderr says so.
      revision: a branch, tag or commit, for a hub id.
      mesh: devices to shard the parameters over, see ``kvjax.make_mesh``. Each tensor is read once,
        and each device receives its shard. ``"auto"`` uses the default device, or as many local
        devices as are necessary to hold the weights. None always uses the default device.

    Returns:
      The model. Its parameters are uncommitted on the default device, so that a training step with
      a new optimizer state compiles once, or committed to the devices of the mesh. On a CPU without
      a mesh, all parameters share one allocation, which is freed with the last of them. The first
      step that donates them therefore copies them.

    Raises:
      CheckpointError: if the checkpoint can't be found or read. The message names the file and the
        field or tensor, with the expected value, or says what to do.
      ValueError: if ``dtype`` is not one of the three, or ``revision`` is given for a folder.

    Example:
      ```python
      lm = models.load()  # the embedded model; or a folder, or "owner/name" on the hub
      print(lm)
      ```
    """
    device = Device()
    if dtype is not None:
        _dtype_name(dtype)
    folder = locate(path_or_id, revision)
    # Reading these first rejects an unsupported model before gigabytes are downloaded.
    config = read_config(folder)
    tokenizer = read_tokenizer(folder)
    generation = read_generation(folder, config.model_type)
    files = weight_files(folder, other_part)
    folder = locate(path_or_id, commit_of(folder) or revision, weights=files)
    stored, others = take_text(find_tensors(folder, other_part))
    if not stored:
        which = "tensor of a text model" if others else "tensor"
        raise CheckpointError(f"{folder}: the safetensors files contain no {which}")
    config = dataclasses.replace(config, dtype=config.dtype or weights.stored_dtype(stored))
    chosen = dtype is None and config.dtype == "bfloat16" and device.target().before_ampere
    computed = compute_dtype(config, dtype, device.target())
    config, matched = _matched(dataclasses.replace(config, dtype=computed), stored)
    reason = f"{config.model_type} exceeds the range of float16" if computed == "float32" else ""
    try:
        params, over = _read_params(config, matched, device, mesh, chosen)
    except weights.OutOfRangeError as error:
        reason = str(error)
        config = dataclasses.replace(config, dtype="float32")
    # Outside the handler, because the exception keeps the float16 tensors alive.
    if config.dtype != computed:
        params, over = _read_params(config, matched, device, mesh, False)
    if chosen:
        which = f"{default_device().device_kind} has no bfloat16"
        because = f": {reason}" if reason else ""
        _notice(f"{which}, computing in {config.dtype}{because}")
    if wide := weights.count_float64(matched):
        _notice(f"{wide} float64 tensor{'s' if wide > 1 else ''} read as float32")
    if others:
        _notice(f"only the text part is loaded, without {skipped(others)}")
    return LanguageModel(
        config=config,
        params=params,
        tokenizer=tokenizer,
        generation=generation,
        architecture=Architecture(config),
        source=str(folder),
        mesh=over,
    )


def _notice(line: str) -> None:
    print(f"kvjax: {line}", file=sys.stderr)


def compute_dtype(config: Config, dtype: DTypeLike | None, target: Target) -> str:
    """The dtype of computation on a target: the requested one, or the default. "" if the config
    has no dtype either."""
    if dtype is not None:
        return _dtype_name(dtype)
    if target.platform == "cpu":
        return "float32"
    if config.dtype == "bfloat16" and target.before_ampere:
        return "float32" if config.model_type.startswith(_WIDE) else "float16"
    return config.dtype


def _matched(config: Config, stored: Stored) -> tuple[Config, Stored]:
    """Rename tensors to the model's parameter names, and find out whether the head is tied."""
    names, tied = config.names, config.tie_word_embeddings
    matched = weights.match_names(stored, _shapes(config), names, tied=tied)
    if tied and weights.head_differs(matched, names):
        config = dataclasses.replace(config, tie_word_embeddings=False)
    elif tied:
        matched.pop(weights.HEAD, None)
    shapes = _shapes(config)
    weights.check_tensors(matched, shapes, names)
    return config, matched


def _read_params(
    config: Config, matched: Stored, device: Device, mesh: MeshChoice, check_range: bool
) -> tuple[Params, Mesh | None]:
    """Read the parameters, and return the mesh that they are on. With ``check_range``, raise
    ``OutOfRangeError`` for a tensor that exceeds the range of float16."""
    shapes, names = _shapes(config), config.names
    over = auto_mesh(Architecture(config)) if mesh == "auto" else mesh
    check_range = check_range and config.dtype == "float16"
    if over is None:
        read = weights.load_tensors(matched, shapes, names, config.dtype, device, check_range)
        return read, None
    shardings = dict(weights.flatten(Architecture(config).param_shardings(over)))
    read = weights.load_shares(matched, shapes, names, config.dtype, shardings, check_range)
    return read, over


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's parameters, by their names in files."""
    leaves = weights.flatten(Architecture(config).abstract_params())
    return {name: tuple(leaf.shape) for name, leaf in leaves}


def _dtype_name(dtype: DTypeLike) -> str:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ArgumentError(
            f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}", param="dtype"
        )
    return name


EMBEDDED = Path(__file__).parent / "tiny"
"""The checkpoint that is part of the package."""

_SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/*.jinja",
    "chat_template.json", "tokenizer.model", "merges.txt", "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)  # fmt: skip
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def locate(
    path_or_id: str | Path | None, revision: str | None, *, weights: Sequence[str] = ()
) -> Path:
    """The folder of a checkpoint. If a hub checkpoint is not in the hub's cache, it is downloaded.

    Args:
      path_or_id: a folder, or a hub id (``owner/name``); None is the embedded model.
      revision: a branch, tag or commit, for a hub id.
      weights: weight files to download in addition to the small files.

    Raises:
      CheckpointError: if neither the folder nor the model exists, or the hub can't be reached or
        refuses access. The message says what to do.
      ValueError: if ``revision`` is given for a folder.
    """
    folder = EMBEDDED if path_or_id is None else expand_user(path_or_id)
    try:
        is_folder, exists = folder.is_dir(), folder.exists()
    except OSError as error:
        raise CheckpointError(f"{folder}: can't be read: {error}") from error
    if path_or_id is None or is_folder:
        if revision is not None:
            raise ArgumentError(
                f"revision={revision!r} is for hub ids; {folder} is a folder", param="revision"
            )
        return folder
    if exists:
        raise CheckpointError(f"{folder}: is a file; expected the folder of a checkpoint")
    if not _HUB_ID.fullmatch(str(path_or_id)):
        raise CheckpointError(f"{path_or_id}: not an existing folder, and not a valid hub id")
    return _download(str(path_or_id), revision, (*_SMALL_FILES, *weights))


def commit_of(folder: Path) -> str | None:
    """The commit of a folder of the hub's cache, to download more files of the same commit."""
    return folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else None


def _download(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    at = f"{name} at revision {revision}" if revision else name
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(patterns)
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name}: this model is gated. Accept its terms on its page of the hub, log in with "
            "`hf auth login` or set HF_TOKEN, and try again"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name}: the hub has no revision {revision!r} of this model"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name}: no folder and no public model on the hub has this name. Check the spelling; "
            "if the model is private, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(
            f"{name}: not an existing folder, and not a valid hub id: {error}"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{at}: not in the hub's cache, and the hub can't be reached. Connect and try again "
            "(unset HF_HUB_OFFLINE if it is set), or give a folder"
        ) from error
    except errors.HfHubHTTPError as error:
        raise CheckpointError(f"{at}: {_refusal(error)}") from error
    except OSError as error:
        raise CheckpointError(
            f"{at}: can't be downloaded: {error}. Check the connection and the space on disk, or "
            "give a folder"
        ) from error
    return Path(folder)


def _refusal(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return (
            f"the hub refused access ({status}). Log in with `hf auth login` or set HF_TOKEN, and "
            "accept the model's terms on its page if it has any"
        )
    return f"the hub answered {status if status is not None else error}. Try again later"


def read_generation(folder: Path, model_type: str) -> GenerationDefaults:
    """Read ``generation_config.json``. Missing token ids are taken from ``config.json``.

    Raises:
      CheckpointError: if a file can't be read or a field has the wrong type.
    """
    config = read_text_fields(folder)
    file = folder / "generation_config.json"
    fields = Fields(file, read_json(file) if file.exists() else {})
    defaults = ModelType() if fields.values else FAMILIES[model_type]

    def source(name: str) -> Fields:
        return fields if fields.raw(name) is not None else config

    def setting(name: str) -> float | None:
        return None if fields.raw(name) is None else fields.number(name, positive=False)

    def token(name: str, default: int | None = None) -> int | None:
        if name in config.values:
            default = None
        value = source(name).raw(name, default)
        if value == -1:
            # Some files use -1 for no token.
            return None
        return None if value is None else source(name).integer(name, default, least=0)

    return GenerationDefaults(
        eos_token_ids=_ids(source("eos_token_id"), "eos_token_id", defaults.eos, config),
        bos_token_id=token("bos_token_id", defaults.bos),
        pad_token_id=token("pad_token_id"),
        do_sample=None if fields.raw("do_sample") is None else fields.flag("do_sample", False),
        temperature=setting("temperature"),
        top_k=None if fields.raw("top_k") is None else fields.integer("top_k", least=0),
        top_p=setting("top_p"),
        min_p=setting("min_p"),
        repetition_penalty=setting("repetition_penalty"),
        decoder_start_token_id=token("decoder_start_token_id"),
    )


def _ids(fields: Fields, name: str, default: int | None, config: Fields) -> tuple[int, ...]:
    value = fields.raw(name, None if name in config.values else default)
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(x, int) and not isinstance(x, bool) for x in values):
        raise fields.wrong(name, "a token id or a list of them")
    return tuple(x for x in values if x >= 0)
