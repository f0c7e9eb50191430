"""Load a checkpoint: a folder, a model of the Hugging Face hub, or the embedded one."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.core.array_folder import expand_user
from kvjax.core.errors import CheckpointError
from kvjax.core.target import Target, default_device
from kvjax.generation.loaded_model import LanguageModel
from kvjax.memory.limits import auto_mesh
from kvjax.placement.device import Device

from . import weights
from .architecture import Architecture, Params
from .config import DTYPES, Config
from .config_json import read_config
from .generation import read_generation
from .multimodal import other_part, skipped, take_text
from .stored import Stored, find_tensors, weight_files
from .text import read_tokenizer

_WIDE = "gemma2", "gemma3", "gemma4", "t5"
"""How types of models begin whose activations exceed the range of float16."""


def load(
    path_or_id: str | Path | None = None,
    *,
    dtype: Any = None,
    revision: str | None = None,
    mesh: Mesh | Literal["auto"] | None = "auto",
) -> LanguageModel:
    """Load a model, its tokenizer and its settings.

    Weights come from safetensors, one tensor at a time, so that the peak of memory is little
    over the model's own size; nothing is unpickled and no code of a checkpoint runs. Of a model
    that reads images, audio or video too, only the text part is loaded, and a line on stderr names
    what was left out; files that hold nothing else are not downloaded. Weights of float64 are read
    as float32, and a line on stderr says so.

    Args:
      path_or_id: a folder in the Transformers format, a hub id (``owner/name``), or None for the
        model that comes with the package.
      dtype: what to compute in: float32, bfloat16 or float16. By default the checkpoint's own on
        an accelerator, float32 on a CPU, which takes twice the memory and rounds less. On a GPU
        without bfloat16 (a T4) such a checkpoint is computed in float16 if its range allows that,
        otherwise in float32; a line on stderr says so.
      revision: a hub id's branch, tag or commit.
      mesh: devices that the parameters are spread over, see ``kvjax.make_mesh``: each tensor is
        read once, and every device is given its share of it. ``"auto"`` is the default device, and
        as many of the local ones as are needed where it has no memory for the weights; None is the
        default device in any case.

    Returns:
      The model, with every parameter on the default device, uncommitted (so that a training step
      with an optimizer's fresh state compiles once), or committed to the devices of the mesh. On
      one CPU they lie in one stretch of memory, let go with the last of them: a first step that
      is donated parameters copies them.

    Raises:
      CheckpointError: naming the file, the field or tensor, and what was expected; for a hub id,
        what to do where it can't be had.
      ValueError: if ``dtype`` is not one of the three, or ``revision`` is given for a folder.
    """
    device = Device()
    if dtype is not None:
        _dtype_name(dtype)
    folder = locate(path_or_id, revision)
    # Read first, so that a model that can't be used is refused before gigabytes are fetched.
    config = read_config(folder)
    tokenizer = read_tokenizer(folder)
    generation = read_generation(folder, config.model_type)
    files = weight_files(folder, other_part)
    folder = locate(path_or_id, commit_of(folder) or revision, weights=files)
    stored, others = take_text(find_tensors(folder, other_part))
    if not stored:
        which = "tensor of a text model" if others else "tensor"
        raise CheckpointError(f"{folder}: the safetensors files hold no {which}")
    config = dataclasses.replace(config, dtype=config.dtype or weights.stored_dtype(stored))
    chosen = dtype is None and config.dtype == "bfloat16" and device.target().before_ampere
    computed = compute_dtype(config, dtype, device.target())
    config, matched = _matched(dataclasses.replace(config, dtype=computed), stored)
    reason = f"{config.model_type} exceeds the range of float16" if computed == "float32" else ""
    try:
        params, over = _read_params(config, matched, device, mesh, check_range=chosen)
    except weights.OutOfRangeError as error:
        reason = str(error)
        config = dataclasses.replace(config, dtype="float32")
    # Not in the handler: the error holds what was read in float16.
    if config.dtype != computed:
        params, over = _read_params(config, matched, device, mesh)
    if chosen:
        which = f"{default_device().device_kind} has no bfloat16"
        because = f": {reason}" if reason else ""
        _notice(f"{which}, computing in {config.dtype}{because}")
    if wide := weights.count_float64(matched):
        _notice(f"{wide} tensor{'s' if wide > 1 else ''} of float64 read as float32")
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


def compute_dtype(config: Config, dtype: Any, target: Target) -> str:
    """What a model is computed in on a target: as it was asked for, or by default; "" where
    neither that nor its config says."""
    if dtype is not None:
        return _dtype_name(dtype)
    if target.platform == "cpu":
        return "float32"
    if config.dtype == "bfloat16" and target.before_ampere:
        return "float32" if config.model_type.startswith(_WIDE) else "float16"
    return config.dtype


def _matched(config: Config, stored: Stored) -> tuple[Config, Stored]:
    """The tensors under the names of the model's parameters, and whether its head is its own."""
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
    config: Config, matched: Stored, device: Device, mesh: Any, *, check_range: bool = False
) -> tuple[Params, Mesh | None]:
    """The parameters, and the mesh that they are on. ``check_range``: raise ``OutOfRangeError``
    for a tensor that float16 can't hold."""
    shapes, names = _shapes(config), config.names
    over = auto_mesh(Architecture(config)) if mesh == "auto" else mesh
    check_range = check_range and config.dtype == "float16"
    if over is None:
        read = weights.load_tensors(matched, shapes, names, config.dtype, device, check_range)
        return read, None
    shardings = _flat(Architecture(config).param_shardings(over))
    read = weights.load_shares(matched, shapes, names, config.dtype, shardings, check_range)
    return read, over


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The model's parameters: names as in files, shapes as in the model."""
    found = _flat(Architecture(config).abstract_params())
    return {name: tuple(leaf.shape) for name, leaf in found.items()}


def _flat(params: Params) -> dict[str, Any]:
    """What stands in nested dicts, by the names that files have."""
    flat: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        for key, child in node.items():
            if isinstance(child, dict):
                walk(child, f"{path}{key}.")
            else:
                flat[path + key] = child

    walk(params, "")
    return flat


def _dtype_name(dtype: Any) -> str:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    return name


EMBEDDED = Path(__file__).parent / "tiny"
"""The checkpoint that comes with the package."""

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
    """The folder of a checkpoint, downloaded if it is on the hub and not in the cache yet.

    Args:
      path_or_id: a folder, or a hub id (``owner/name``); None is the embedded model.
      revision: a hub id's branch, tag or commit.
      weights: the names of files of weights that are wanted too; without any a download is small.

    Raises:
      CheckpointError: if there is no such folder and no such model, or the hub can't be reached
        or refuses; it says what to do.
      ValueError: if ``revision`` is given for a folder.
    """
    folder = EMBEDDED if path_or_id is None else expand_user(path_or_id)
    try:
        is_folder, exists = folder.is_dir(), folder.exists()
    except OSError as error:
        raise CheckpointError(f"{folder}: can't be read: {error}") from error
    if path_or_id is None or is_folder:
        if revision is not None:
            raise ValueError(f"revision={revision!r} is for hub ids; {folder} is a folder")
        return folder
    if exists:
        raise CheckpointError(f"{folder}: is a file; expected the folder of a checkpoint")
    if not _HUB_ID.fullmatch(str(path_or_id)):
        raise CheckpointError(f"{path_or_id}: there is no such folder, and it is no hub id either")
    return _download(str(path_or_id), revision, (*_SMALL_FILES, *weights))


def commit_of(folder: Path) -> str | None:
    """The commit that a folder of the hub's cache holds, so that a second look gets the same."""
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
        raise CheckpointError(f"{name}: the hub has no revision {revision!r} of it") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name}: there is no such folder here and no such public model on the hub. Check the "
            "spelling; if it is private, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{name}: there is no such folder, and no hub id: {error}") from error
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
