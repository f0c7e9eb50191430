"""Load a checkpoint: a folder, a model of the Hugging Face hub, or the embedded model."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvjax.core.target import Target, default_device
from kvjax.core.validation import ArgumentError, CheckpointError
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import GenerationDefaults
from kvjax.memory.limits import auto_mesh
from kvjax.placement.device import Device

from . import gguf, weights
from .architecture import Architecture
from .config import DTYPES, Config
from .config_fields import FAMILIES, ModelType
from .config_json import config_from_fields
from .files import Fields, Stored, StoredTensor, find_tensors, read_json, weight_files
from .hub import commit_of, locate
from .multimodal import other_part, read_text_fields, skipped, take_text, text_fields
from .text import Tokenizer, read_tokenizer
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

    Weights are read from safetensors or GGUF, one tensor at a time, so peak memory is only a little
    above the size of the model. Nothing is unpickled, and no code of the checkpoint runs. Only the
    text part of a multimodal model is loaded. A line on stderr names what was skipped, and files
    without text weights are not downloaded. float64 weights are read as float32, with a line on
    stderr. The quantized weights of a GGUF file are decoded to floats.

    Args:
      path_or_id: a folder in the Transformers format, a GGUF file or a folder with one, a hub id
        (``owner/name``, or ``owner/name/file.gguf``), or None for the model that comes with the
        package. GGUF needs the extra ``gguf``.
      dtype: the dtype of computation: float32, bfloat16 or float16. By default float32 on a CPU,
        and the checkpoint's dtype on an accelerator, which is bfloat16 if weights are quantized. On
        a GPU without bfloat16 (a T4), a bfloat16 checkpoint is computed in float16, or in float32
        if its weights, or the activations of its family, exceed the range of float16. A line on
        stderr says so.
      revision: a branch, tag or commit, for a hub id.
      mesh: devices to shard the parameters over, see ``kvjax.make_mesh``. Each tensor is read once,
        and each device receives its shard. ``"auto"`` uses the default device, or as many local
        devices as are necessary to hold the weights. None always uses the default device.

    Returns:
      The model. On a mesh, its parameters are committed to the mesh's devices. Otherwise they are
      uncommitted on the default device, so that a training step with a new optimizer state compiles
      once. On a CPU without a mesh, all parameters share one allocation, which is freed with the
      last of them. The first step that donates them therefore copies them.

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
    checkpoint = _open(path_or_id, revision)
    config, target = checkpoint.config, device.target()
    chosen = dtype is None and config.dtype == "bfloat16" and target.before_ampere
    computed = compute_dtype(config, dtype, target)
    config, matched = checkpoint.match(dataclasses.replace(config, dtype=computed))
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
    elif dtype is None and target.platform != "cpu" and checkpoint.config.dtype != computed:
        _notice(f"{config.model_type} exceeds the range of float16, computing in {config.dtype}")
    if wide := weights.count_float64(matched):
        _notice(f"{wide} float64 tensor{'s' if wide > 1 else ''} read as float32")
    if checkpoint.others:
        _notice(f"only the text part is loaded, without {skipped(checkpoint.others)}")
    return LanguageModel(
        config=config,
        params=params,
        tokenizer=checkpoint.tokenizer,
        generation=checkpoint.generation,
        architecture=Architecture(config),
        source=str(checkpoint.source),
        mesh=over,
    )


@dataclass(frozen=True)
class _Checkpoint:
    """What a checkpoint has, in either format, before its weights are read.

    ``match`` returns the config with its final fields, and the tensor of each parameter.
    ``others``: tensors of other parts than the text model.
    """

    source: Path
    config: Config
    tokenizer: Tokenizer | None
    generation: GenerationDefaults
    match: Callable[[Config], tuple[Config, Stored]]
    others: dict[str, list[StoredTensor]]


def _open(path_or_id: str | Path | None, revision: str | None) -> _Checkpoint:
    path = locate(path_or_id, revision)
    return _open_gguf(path) if path.is_file() else _open_folder(path_or_id, revision, path)


def _open_gguf(path: Path) -> _Checkpoint:
    file = gguf.read_gguf(path)
    described, config = _gguf_config(file)

    def match(config: Config) -> tuple[Config, Stored]:
        return config, gguf.match_tensors(file, described, config, _shapes(config))

    tokenizer = gguf.gguf_tokenizer(path, file.metadata)
    return _Checkpoint(path, config, tokenizer, gguf.read_generation(file), match, {})


def _open_folder(path_or_id: str | Path | None, revision: str | None, folder: Path) -> _Checkpoint:
    # Reading these first rejects an unsupported model before gigabytes are downloaded.
    config = read_config(folder)
    tokenizer = read_tokenizer(folder)
    generation = read_generation(folder, config.model_type)
    files = weight_files(folder, other_part)
    folder = locate(path_or_id, commit_of(folder) or revision, weights=files)
    if folder.is_file():  # a hub repository with a config, but with weights as GGUF only
        return _open_gguf(folder)
    stored, others = take_text(find_tensors(folder, other_part))
    if not stored:
        which = "tensor of a text model" if others else "tensor"
        raise CheckpointError(f"{folder}: the safetensors files contain no {which}")
    config = dataclasses.replace(config, dtype=config.dtype or weights.stored_dtype(stored))

    def match(config: Config) -> tuple[Config, Stored]:
        return _matched(config, stored)

    return _Checkpoint(folder, config, tokenizer, generation, match, others)


def read_config(path: str | Path) -> Config:
    """Read a checkpoint's configuration. For a multimodal checkpoint, read its text model.

    Args:
      path: the checkpoint's folder, its ``config.json``, or a GGUF file.

    Returns:
      The configuration. Its ``dtype`` is "" if the file does not specify one.

    Raises:
      CheckpointError: if the file can't be read, the model family is not supported, or a field has
        an unsupported value that would change the model's output. The message names the file, the
        field, its value, and what was expected.

    Example:
      ```python
      config = models.read_config(lm.source)
      print(config.num_hidden_layers, config.head_dim)
      ```
    """
    path = Path(path)
    if not (path / "config.json").exists() and (file := gguf.find_gguf(path)) is not None:
        return _gguf_config(gguf.read_gguf(file))[1]
    file = path if path.is_file() else path / "config.json"
    return config_from_fields(text_fields(Fields(file, read_json(file))))


def _gguf_config(file: gguf.GGUFFile) -> tuple[gguf.GGUFConfig, Config]:
    described = gguf.config_values(file)
    return described, config_from_fields(Fields(file.path, described.values))


def _notice(line: str) -> None:
    print(f"kvjax: {line}", file=sys.stderr)


def compute_dtype(config: Config, dtype: DTypeLike | None, target: Target) -> str:
    """The dtype of computation on a target: the requested one, or the default. "" if the config
    has no dtype either."""
    if dtype is not None:
        return _dtype_name(dtype)
    if target.platform == "cpu":
        return "float32"
    wide = config.model_type.startswith(_WIDE)
    stored = "bfloat16" if wide and config.dtype == "float16" else config.dtype
    if stored == "bfloat16" and target.before_ampere:
        return "float32" if wide else "float16"
    return stored


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
