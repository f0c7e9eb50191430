"""Find a checkpoint: a folder here, or a model of the Hugging Face hub in its local cache."""

import re
from collections.abc import Sequence
from pathlib import Path

from kvjax.core.array_folder import expand_user
from kvjax.core.errors import CheckpointError

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
