"""Load a checkpoint: a folder, a model of the Hugging Face hub, or the embedded one."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.core.errors import CheckpointError
from kvjax.generation.loaded import LanguageModel
from kvjax.memory.limits import auto_mesh
from kvjax.placement.device import Device

from . import weights
from .architecture import Architecture, Params
from .config import DTYPES
from .config_families import Config
from .config_json import read_config
from .generation import read_generation
from .hub import commit_of, locate
from .stored import Stored, find_tensors
from .text import read_tokenizer


def load(
    path_or_id: str | Path | None = None,
    *,
    dtype: Any = None,
    revision: str | None = None,
    mesh: Mesh | Literal["auto"] | None = "auto",
) -> LanguageModel:
    """Load a model, its tokenizer and its settings.

    Weights come from safetensors, one tensor at a time, so that the peak of memory is little
    over the model's own size; nothing is unpickled and no code of a checkpoint runs.

    Args:
      path_or_id: a folder in the Transformers format, a hub id (``owner/name``), or None for the
        model that comes with the package.
      dtype: what to compute in: float32, bfloat16 or float16. By default the checkpoint's own on
        an accelerator, float32 on a CPU, which takes twice the memory and rounds less.
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
    folder = locate(path_or_id, revision, weights=False)
    # Read first, so that a model that can't be used is refused before gigabytes are fetched.
    config = read_config(folder)
    tokenizer = read_tokenizer(folder)
    generation = read_generation(folder, config.model_type)
    folder = locate(path_or_id, commit_of(folder) or revision, weights=True)
    stored = find_tensors(folder)
    if not stored:
        raise CheckpointError(f"{folder}: the safetensors files hold no tensor")
    computed = compute_dtype(config, dtype, device.platform()) or weights.stored_dtype(stored)
    config = dataclasses.replace(config, dtype=computed)
    config, matched = _matched(config, stored)
    if mesh == "auto":
        mesh = auto_mesh(Architecture(config))
    params = _read_params(config, matched, device, mesh)
    return LanguageModel(
        config=config,
        params=params,
        tokenizer=tokenizer,
        generation=generation,
        architecture=Architecture(config),
        source=str(folder),
        mesh=mesh,
    )


def compute_dtype(config: Config, dtype: Any, platform: str) -> str:
    """What a model is computed in, on a platform: as it was asked for, or by default; "" where
    neither that nor its config says."""
    if dtype is not None:
        return _dtype_name(dtype)
    return "float32" if platform == "cpu" else config.dtype


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


def _read_params(config: Config, matched: Stored, device: Device, mesh: Mesh | None) -> Params:
    shapes, names = _shapes(config), config.names
    if mesh is None:
        return weights.load_tensors(matched, shapes, names, config.dtype, device)
    shardings = _flat(Architecture(config).param_shardings(mesh))
    return weights.load_shares(matched, shapes, names, config.dtype, shardings)


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
