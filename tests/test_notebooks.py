"""Every notebook runs from top to bottom, and is committed without outputs."""

import importlib.util
import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))

needs_nbclient = pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None or importlib.util.find_spec("ipykernel") is None,
    reason="needs nbclient and ipykernel (the extra `notebooks`)",
)


SMALLER = {
    "placement.ipynb": {"count=500": "count=50"},
    "quantization.ipynb": {
        "every = (8, 4, 3, 2, 1)": "every = (8, 2)",
        "context=1024": "context=256",
    },
    "quickstart.ipynb": {"[64, 128, 256, 512, 960]": "[64, 128]"},
    "sharded.ipynb": {
        # Compiled as in this process, which has as many devices.
        '"--xla_force_host_platform_device_count=8"': repr(os.environ["XLA_FLAGS"]),
        "counts = [1, 2, 4, 8]": "counts = [1, 8]",
    },
}
"""Numbers of the notebooks, and others for them that take less time; not with ``KVJAX_FULL=1``."""


def test_there_is_a_notebook():
    assert "quickstart.ipynb" in [path.name for path in NOTEBOOKS]


@needs_nbclient
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path, tmp_path, monkeypatch, full):
    import nbclient
    import nbformat

    # The kernel sees this checkout however the tests were started.
    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for number, other in () if full else SMALLER.get(path.name, {}).items():
        (cell,) = (c for c in notebook.cells if c.cell_type == "code" and number in c.source)
        cell.source = cell.source.replace(number, other)
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
