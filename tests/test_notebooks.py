"""Every notebook runs from top to bottom, and is committed without outputs."""

import importlib.util
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))

needs_nbclient = pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None or importlib.util.find_spec("ipykernel") is None,
    reason="needs nbclient and ipykernel (the extra `notebooks`)",
)


def test_there_is_a_notebook():
    assert "quickstart.ipynb" in [path.name for path in NOTEBOOKS]


@needs_nbclient
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path, tmp_path, monkeypatch):
    import nbclient
    import nbformat

    # The kernel sees this checkout however the tests were started.
    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    settings = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=600, startup_timeout=300, kernel_name="python3", resources=settings
    ).execute()
    errors = [
        output.ename
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "error"
    ]
    assert not errors


@needs_nbclient
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_has_no_outputs(path):
    import nbformat

    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
