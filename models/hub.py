"""Finding a checkpoint: a folder, a GGUF file, or a model on the Hugging Face hub."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvjax.core.array_folder import expand_user
from kvjax.core.validation import ArgumentError, CheckpointError

from . import gguf

EMBEDDED = Path(__file__).parent / "tiny"
"""The checkpoint that is part of the package."""

_SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/*.jinja",
    "chat_template.json", "tokenizer.model", "merges.txt", "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)  # fmt: skip
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_HUB_GGUF = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)/(.+\.gguf)", re.IGNORECASE)
_CLIENTS = ("httpcore", "httpx", "httpx2", "requests", "urllib3")
"""The packages whose errors the hub's client lets through."""


def locate(
    path_or_id: str | Path | None, revision: str | None, *, weights: Sequence[str] = ()
) -> Path:
    """Return the folder of a checkpoint, or its GGUF file. A hub checkpoint that is not in the
    hub's cache is downloaded.

    Args:
      path_or_id: a folder, a GGUF file, or a hub id (``owner/name``, or ``owner/name/file.gguf``);
        None means the embedded model.
      revision: a branch, tag or commit, for a hub id.
      weights: weight files to download in addition to the small files.

    Raises:
      CheckpointError: if neither the folder nor the model exists, or the hub can't be reached or
        refuses access. The message says what to do.
      ValueError: if ``revision`` is given for a local path.
    """
    folder = EMBEDDED if path_or_id is None else expand_user(path_or_id)
    try:
        is_folder, exists = folder.is_dir(), folder.exists()
    except OSError as error:
        raise CheckpointError(f"{folder}: can't be read: {error}") from error
    if path_or_id is None or exists:
        if revision is not None:
            kind = "a folder" if is_folder else "a file"
            raise ArgumentError(
                f"revision={revision!r} is for hub ids; {folder} is {kind}", param="revision"
            )
        return _local(folder, is_folder)
    name, file = _hub_names(str(path_or_id))
    if file is not None:
        return _download_file(name, file, revision)
    folder = _download(name, revision, (*_SMALL_FILES, *weights))
    needed = weights or ("config.json",)
    if any((folder / each).exists() for each in needed):
        return folder
    # A repository without weights for Transformers may have GGUF files.
    revision = commit_of(folder) or revision
    file = gguf.only_model(name, _list_files(name, revision, folder))
    if file is None:
        raise CheckpointError(f"{name}: the repository has no {needed[0]} and no GGUF file")
    return _download_file(name, file, revision)


def _local(path: Path, is_folder: bool) -> Path:
    """Return an existing path: the GGUF file if a folder has no other weights."""
    if not is_folder and not gguf.is_gguf(path.name):
        raise CheckpointError(
            f"{path}: is a file; expected the folder of a checkpoint, or a GGUF file"
        )
    try:
        return gguf.find_gguf(path) or path
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error}") from error


def _hub_names(path_or_id: str) -> tuple[str, str | None]:
    """Split a hub id into the repository and the GGUF file in it, if it names one.

    Raises:
      CheckpointError: if it is neither an existing path nor a valid hub id.
    """
    if _HUB_ID.fullmatch(path_or_id) and not gguf.is_gguf(path_or_id):
        return path_or_id, None
    match = _HUB_GGUF.fullmatch(path_or_id)
    if match is not None and ".." not in match[2].split("/"):
        return match[1], match[2]
    if gguf.is_gguf(path_or_id):
        raise CheckpointError(
            f"{path_or_id}: file not found. On the hub, a file is owner/name/file.gguf"
        )
    raise CheckpointError(f"{path_or_id}: not an existing folder, and not a valid hub id")


def _download_file(name: str, file: str, revision: str | None) -> Path:
    """Download a GGUF file with its other shards, and return its path."""
    folder = Path(file).parent
    files = [(folder / shard).as_posix() for shard in gguf.shard_names(Path(file).name)]
    path = _download(name, revision, tuple(files)) / file
    if not path.is_file():
        raise CheckpointError(f"{name}: the repository has no file {file}")
    return path


def commit_of(folder: Path) -> str | None:
    """Return the commit of a folder in the hub's cache, to download more files of the same commit;
    None for other folders."""
    return folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else None


def _download(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub

    with _hub_errors(name, revision):
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(patterns)
        )
    return Path(folder)


def _list_files(name: str, revision: str | None, folder: Path) -> list[str]:
    """Return the names of all files of a hub repository; without a connection, of those in its
    ``folder`` of the hub's cache."""
    import huggingface_hub

    try:
        with _hub_errors(name, revision):
            return huggingface_hub.HfApi().list_repo_files(name, revision=revision)
    except CheckpointError:
        files = [path for path in folder.rglob("*.gguf") if path.is_file()]
        if not files:
            raise
        return [path.relative_to(folder).as_posix() for path in files]


@contextlib.contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Convert errors of the hub to ``CheckpointError``, with a message that says what to do."""
    from huggingface_hub import errors

    at = f"{name} at revision {revision}" if revision else name
    try:
        yield
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
    except Exception as error:
        client = type(error).__module__.split(".")[0]
        if not isinstance(error, OSError) and client not in _CLIENTS:
            raise
        raise CheckpointError(
            f"{at}: can't be downloaded: {error}. Check the connection and the space on disk, or "
            "give a folder"
        ) from error


def _refusal(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return (
            f"the hub refused access ({status}). Log in with `hf auth login` or set HF_TOKEN, and "
            "accept the model's terms on its page if it has any"
        )
    return f"the hub answered {status if status is not None else error}. Try again later"
