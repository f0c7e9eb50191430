"""GGUF files that llama.cpp's converter wrote give Transformers' logits.

``tests/data/gguf/make.py`` wrote the files and the logits. It shares no code with kvjax, so unlike
``tests/test_gguf.py`` these tests can't be wrong together with the loader.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs the package gguf (the extra `gguf`)")

from kvjax import models

FOLDER = Path(__file__).parent / "data" / "gguf"
NAMES = sorted(file.stem for file in FOLDER.glob("*.gguf"))
TOLERANCE = 1e-5
"""Relative to the largest logit."""
FAST = ("gemma2", "llama-llama3")


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    """Token ids, and logits by the name of a file. ``NAME@12`` is for the first 12 tokens alone."""
    with np.load(FOLDER / "logits.npz") as arrays:
        return dict(arrays)


def check_logits(lm: Any, stored: dict[str, np.ndarray], name: str) -> None:
    """Compare a model's logits with all that are stored for it."""
    keys = [key for key in stored if key.split("@")[0] == name]
    assert keys
    for key in keys:
        expected = stored[key]
        tokens = jnp.asarray(stored["tokens"][:, : expected.shape[1]])
        logits = np.asarray(jax.jit(lm.apply)(lm.params, tokens))
        assert logits.dtype == np.float32
        atol = TOLERANCE * float(np.abs(expected).max())
        np.testing.assert_allclose(logits, expected, rtol=0, atol=atol, err_msg=key)


def test_every_file_has_logits(stored: dict[str, np.ndarray]) -> None:
    assert {key.split("@")[0] for key in stored} == {*NAMES, "tokens"}
    assert len(NAMES) == 25 and set(FAST) <= set(NAMES)
    assert all(np.ptp(logits) > 1 for logits in stored.values())


@pytest.mark.slow(but=FAST)
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, stored: dict[str, np.ndarray], tmp_path: Path) -> None:
    """The model computes Transformers' logits, and so does the checkpoint that it is saved as."""
    lm = models.load(FOLDER / f"{name}.gguf")
    check_logits(lm, stored, name)
    generation = lm.generation
    assert (generation.bos_token_id, generation.pad_token_id) == (1, 0)
    assert generation.eos_token_ids == (2,)
    assert generation.do_sample is True
    assert (generation.temperature, generation.top_k, generation.top_p) == (0.7, 20, 0.9)
    lm.save(tmp_path / "saved")
    saved = models.load(tmp_path / "saved")
    assert saved.generation == generation
    check_logits(saved, stored, name)
