"""Every notebook runs from top to bottom, and is committed without outputs."""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))

SHORT = ("quickstart.ipynb",)
"""What a newcomer opens; the others are of the shards."""

needs_nbclient = pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None or importlib.util.find_spec("ipykernel") is None,
    reason="needs nbclient and ipykernel (the extra `notebooks`)",
)


SMALLER = {
    "caches.ipynb": {"steps=1100": "steps=150", "[64, 256, 1024, 4096, 16384]": "[64, 256]"},
    "paged.ipynb": {
        "sizes = [16, 32, 64, 128]": "sizes = [16]",
        "PROMPT, NEW, SAMPLES = 256, 64, 8": "PROMPT, NEW, SAMPLES = 256, 64, 2",
        "range(5)": "range(2)",
        "range(6)": "range(2)",
    },
    "placement.ipynb": {
        "count=500": "count=100",
        '    "raw, host": kvjax.policy("offloaded_static"),\n': "",
        'MEMORY = "1.75MB"': 'MEMORY = "200kB"',
        # Two layers of it.
        'SHAPES["llama-3-8b"]': 'type(SHAPES["gpt2"])(2, 4096, 14336, 32, 8, 128, 128256)',
        "range(1024, 65537, 1024)": "range(8192, 65537, 57344)",
    },
    "quantization.ipynb": {
        "kvjax.read(cache, 2)": "kvjax.read(cache, 1)",
        "(8, 4, 2, 1), strict": "(8, 8, 2, 2), strict",
        "every = (8, 4, 3, 2, 1)": "every = (8, 2)",
        '    "8 bits": kvjax.policy(bits=8),\n': "",
        '    "2 bits": kvjax.policy(bits=2),\n': "",
        '    "keys 4, values 2": kvjax.policy(key_bits=4, value_bits=2),\n': "",
        "context=1024": "context=256",
    },
    "quickstart.ipynb": {
        "[64, 128, 256, 512, 960]": "[64, 128]",
        "max_len=64": "max_len=128",  # a token is a byte
    },
    "rollouts.ipynb": {"STEPS = 40": "STEPS = 2"},
    "serving.ipynb": {
        "counts = [1, 2, 4, 8, 16]": "counts = [4]",
        "range(5)": "range(2)",
        "sizes, runs = [64, 24]": "sizes, runs = [64, 64]",
        "in (1, 4, 16)": "in (4,)",
    },
    "sharded.ipynb": {
        # Compiled as in this process, which has as many devices.
        '"--xla_force_host_platform_device_count=8"': repr(os.environ["XLA_FLAGS"]),
        '    "tensor=2": kvjax.make_mesh(tensor=2),\n': "",
        "counts = [1, 2, 4, 8]": "counts = [8]",
        '    "last 64 tokens": kvjax.policy("sliding_window", window=64, sinks=4),\n': "",
        '    "4 bits on the host": kvjax.policy("offloaded_static", bits=4),\n': "",
    },
}
"""What stands in the notebooks, and what takes less time in its place. With ``KVJAX_FULL=1`` they
run word by word, and with the embedded model."""


def test_there_is_a_notebook():
    assert {*SHORT} <= {path.name for path in NOTEBOOKS}


@needs_nbclient
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.name in SHORT else pytest.mark.rare)
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.name,
)
def test_notebook_runs(path, tmp_path, monkeypatch, tiny_llama_dir, full):
    import nbclient
    import nbformat

    # The kernel sees this checkout however the tests were started.
    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for words, others in () if full else SMALLER.get(path.name, {}).items():
        (cell,) = (c for c in notebook.cells if c.cell_type == "code" and words in c.source)
        cell.source = cell.source.replace(words, others)
    load = f'models.load("{tiny_llama_dir.as_posix()}", dtype="float32")'
    for cell in () if full else notebook.cells:
        cell.source = re.sub(r"models\.load\(.*?\)", load, cell.source)
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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
@pytest.mark.parametrize("source", ["", "git+https://example.org/kvjax"])
def test_the_first_cell_installs_what_is_missing(path, source, tmp_path, monkeypatch):
    """From the checkout that the notebook is in, or from an address that is there or asked for."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    first = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    first = first.replace('SOURCE = ""', f"SOURCE = {source!r}")
    asked, run = [], []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.run", lambda command, check: run.append(command))
    monkeypatch.setattr("builtins.input", lambda words: asked.append(words) or "git+there")
    for folder in (path.parent, tmp_path):
        monkeypatch.chdir(folder)
        exec(first, {})
    checkout, elsewhere = ([command[5], *command[6:]] for command in run)
    assert checkout[0] == str(path.parents[1]) and elsewhere[0] == (source or "git+there")
    assert len(asked) == (not source)
    assert [held.split("==")[0] for held in elsewhere[1:]] == ["jax", "jaxlib"]
