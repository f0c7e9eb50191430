"""Where checkpoints come from: folders, the hub and its cache, and the messages of refusals."""

import fnmatch
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax import models
from kvjax.models import hub


@pytest.fixture
def folder(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "checkpoint"))


def test_places_that_are_no_checkpoint(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(folder)  # beside which there is no x
    for path, message in (
        (tmp_path / "nowhere", "not an existing folder, and not a valid hub id"),
        (folder / "config.json", "is a file; expected the folder of a checkpoint"),
        ("a/b/c", "not an existing folder, and not a valid hub id"),
        ("../x", "not an existing folder, and not a valid hub id"),
        (tmp_path, r"config\.json: file not found"),
    ):
        with pytest.raises(kvjax.CheckpointError, match=message):
            models.load(path)


def test_unreadable_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(
        kvjax.CheckpointError, match=r"checkpoint: can't be read: .*Permission denied"
    ):
        models.load(folder)


def test_revision_is_for_hub_ids(folder: Path) -> None:
    with pytest.raises(ValueError, match="revision='main' is for hub ids"):
        models.load(folder, revision="main")


def test_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is read before the weights are fetched, both of the same commit."""
    commit = "0123456789" * 4
    cached = Path(shutil.copytree(folder, folder.parent / commit))
    calls: list[tuple] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        wants_weights = "model.safetensors" in allow_patterns
        calls.append((name, revision, wants_weights))
        assert not any(pattern.endswith((".bin", ".py")) for pattern in allow_patterns)
        return str(cached)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    lm = models.load("owner/name", revision="v1")
    assert calls == [("owner/name", "v1", False), ("owner/name", commit, True)]
    assert lm.source == str(cached)
    calls.clear()
    config = json.loads((cached / "config.json").read_text())
    (cached / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(kvjax.CheckpointError, match="model_type"):
        models.load("owner/name")
    assert calls == [("owner/name", None, False)]


def indexed(folder: Path, places: dict[str, str], monkeypatch) -> tuple[Path, list[set[str]]]:
    """An index of the weights of a hub's checkpoint, and the weight files that are asked for."""
    asked: list[set[str]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append({x for x in allow_patterns if x.endswith(".safetensors")})
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index, asked


def test_files_of_any_name_are_fetched_by_the_index(folder, monkeypatch):
    """Those that the index names, and no others."""
    names = "model.safetensors-00001-of-00002.safetensors", "consolidated-2.safetensors"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = len(tensors) // 2
    parts = [dict([*tensors.items()][:half]), dict([*tensors.items()][half:])]
    places = {}
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, {"format": "pt"})
        places |= dict.fromkeys(part, name)
    index, asked = indexed(folder, places, monkeypatch)
    loaded = [models.load(place) for place in ("owner/name", folder)]
    assert asked == [set(), set(names)]
    for lm in loaded:
        assert sum(leaf.size for leaf in jax.tree.leaves(lm.params)) == sum(
            x.size for x in tensors.values()
        )
    for wrong in ("../x.safetensors", "model.bin"):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, wrong)}))
        with pytest.raises(kvjax.CheckpointError, match="weight_map: there is no file"):
            models.load("owner/name")
        assert asked[-1] == set()


def test_files_of_other_parts_alone_are_not_fetched(folder, monkeypatch, capsys):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    places = dict.fromkeys(tensors, "a.safetensors") | {"model.visual.x": "b.safetensors"}
    _, asked = indexed(folder, places, monkeypatch)
    models.load("owner/name")
    assert asked == [set(), {"a.safetensors"}]
    assert capsys.readouterr().err.endswith("the text part is loaded, without visual (1 tensor)\n")


def hub_error(kind: str, status: int | None = None) -> Exception:
    """An error of the hub's client as it raises it, made without a request."""
    from huggingface_hub import errors

    error = getattr(errors, kind).__new__(getattr(errors, kind))
    error.args = ("what the client says",)
    error.response = type("Response", (), {"status_code": status})()
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error("GatedRepoError", 403), "is gated. Accept its terms.*HF_TOKEN"),
        (hub_error("RepositoryNotFoundError", 401), "no folder and no public model on the hub"),
        (hub_error("RevisionNotFoundError", 404), "the hub has no revision 'v9' of this model"),
        (hub_error("LocalEntryNotFoundError"), "at revision v9: not in the hub's cache, and the "
         "hub can't be reached.*HF_HUB_OFFLINE"),
        (hub_error("OfflineModeIsEnabled"), "not in the hub's cache"),
        (hub_error("HFValidationError"), "not a valid hub id: what the client says"),
        (hub_error("HfHubHTTPError", 401), r"refused access \(401\).*HF_TOKEN"),
        (hub_error("HfHubHTTPError", 403), r"refused access \(403\).*accept the model's terms"),
        (hub_error("HfHubHTTPError", 503), "the hub answered 503. Try again later"),
        (OSError(28, "No space left on device"), "can't be downloaded: .*No space left"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_hub_says_no(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(kvjax.CheckpointError, match=f"owner/name.*{message}"):
        models.load("owner/name", revision="v9")


@pytest.mark.slow
def test_hub_offline(tmp_path: Path) -> None:
    """The real client with an empty cache and no network: one clear error."""
    program = (
        "import kvjax; from kvjax import models\n"
        "try: models.load('owner/name')\n"
        "except kvjax.CheckpointError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert "owner/name: not in the hub's cache" in done.stdout, done.stderr


class Hub:
    """A hub with one repository, whose files are copied into the folder of the hub's cache when
    they are downloaded."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.repository, self.cache = folder / "repository", folder / ("0123456789" * 4)
        self.repository.mkdir(parents=True)
        self.cache.mkdir()
        self.error: Exception | None = None
        self.downloads: list[tuple[str, str | None]] = []
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.download)
        monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", self.list_files)

    def files(self) -> list[str]:
        paths = (path for path in self.repository.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.repository).as_posix() for path in paths)

    def list_files(self, *_: object, **__: object) -> list[str]:
        if self.error is not None:
            raise self.error
        return self.files()

    def download(self, name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        for file in self.files():
            if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
                self.downloads.append((file, revision))
                (self.cache / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.repository / file, self.cache / file)
        return str(self.cache)


@pytest.fixture
def gguf_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    pytest.importorskip("gguf", reason="needs the package gguf (the extra `gguf`)")
    return Hub(tmp_path, monkeypatch)


def write_gguf(path: Path) -> None:
    from tests.gguf_files import write_random

    path.parent.mkdir(parents=True, exist_ok=True)
    write_random(path, "llama")


@pytest.mark.parametrize("config", [True, False])
def test_gguf_on_the_hub(config: bool, gguf_hub: Hub) -> None:
    """A repository whose only weights are one GGUF file is that model, with a config.json or
    without. It is downloaded at the commit that was asked for."""
    from tests.gguf_files import random_model

    if config:
        random_model(gguf_hub.repository, "llama")
    write_gguf(gguf_hub.repository / "of all" / "jack-of-all (v1).gguf")
    for other in ("README.md", "gemma-mmproj-f16.gguf", "imatrix.gguf"):
        (gguf_hub.repository / other).write_bytes(b"")
    lm = models.load("owner/name", revision="v1")
    name = "of all/jack-of-all (v1).gguf"
    assert lm.source == str(gguf_hub.cache / name)
    assert gguf_hub.downloads[-1] == (name, gguf_hub.cache.name)
    assert models.load(f"owner/name/{name}").source == lm.source
    gguf_hub.error = ConnectionError("no network")  # what was downloaded is found without it
    assert models.load("owner/name").source == lm.source


def test_several_gguf_files_on_the_hub(gguf_hub: Hub) -> None:
    """Several models are listed, whichever were downloaded before; one of them can be named."""
    for name in ("Q4/m.gguf", "Q8/m.gguf"):
        write_gguf(gguf_hub.repository / name)
    assert models.load("owner/name/Q4/m.gguf").source == str(gguf_hub.cache / "Q4/m.gguf")
    with pytest.raises(
        kvjax.CheckpointError, match=r"owner/name: 2 models: Q4/m\.gguf, Q8/m\.gguf; give"
    ):
        models.load("owner/name")


def test_a_downloaded_gguf_file_does_not_replace_the_checkpoint(
    gguf_hub: Hub, tiny_llama_dir: Path
) -> None:
    shutil.copytree(tiny_llama_dir, gguf_hub.repository, dirs_exist_ok=True)
    write_gguf(gguf_hub.repository / "m.gguf")
    assert models.load("owner/name/m.gguf").config.vocab_size == 61
    lm = models.load("owner/name")
    assert (lm.source, lm.config.vocab_size) == (str(gguf_hub.cache), 258)


def test_what_the_hub_has_not(gguf_hub: Hub, tmp_path: Path) -> None:
    (gguf_hub.repository / "README.md").write_bytes(b"")
    for name, message in (
        ("owner/name", r"owner/name: the repository has no config\.json and no GGUF file"),
        ("owner/name/none.gguf", r"owner/name: the repository has no file none\.gguf"),
        ("owner/name/../../x.gguf", r"x\.gguf: file not found\. On the hub, a file is owner/name/"),
        ("x.gguf", r"x\.gguf: file not found"),
        ("models/x.gguf", r"models/x\.gguf: file not found"),
        (str(tmp_path / "x.gguf"), r"x\.gguf: file not found"),
    ):
        with pytest.raises(kvjax.CheckpointError, match=message):
            models.load(name)
    gguf_hub.error = ConnectionError("no network")
    with pytest.raises(kvjax.CheckpointError, match=r"owner/name.*can't be downloaded: no network"):
        models.load("owner/name")


def test_paths_of_gguf_files(gguf_hub: Hub, tmp_path: Path) -> None:
    """A revision is refused as for a folder; a pipe is not read; any case of the ending is one."""
    write_gguf(tmp_path / "m.GGUF")
    assert models.load(tmp_path / "m.GGUF").config.vocab_size == 61
    with pytest.raises(ValueError, match=r"revision='main' is for hub ids; .* is a file"):
        models.load(tmp_path / "m.GGUF", revision="main")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(kvjax.CheckpointError, match=r"pipe\.gguf"):
        models.load(tmp_path / "pipe.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(folder / "pipe.gguf")
    with pytest.raises(kvjax.CheckpointError, match=r"config\.json: file not found"):
        models.load(folder)


def test_embedded_place() -> None:
    assert hub.locate(None, None) == hub.EMBEDDED
    with pytest.raises(ValueError, match="is for hub ids"):
        hub.locate(None, "main")
