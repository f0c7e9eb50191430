"""Checkpoints of random weights, made and run by Transformers: what the models are held against."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

LENGTH = 40
"""Tokens of the reference pass, and the capacity of caches compared with it. Rotary kinds whose
frequencies depend on the length (dynamic, longrope) take them from the pass's length in
Transformers and from ``max_len`` here, so both must be the same for the comparison to be fair."""
AS_USERS_COMPILE = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""What ``jax.jit`` is told where the cheapest code, the tests' own, rounds too coarsely."""


@pytest.fixture(scope="session")
def torch() -> Any:
    return pytest.importorskip("torch", reason="the oracle needs torch: pip install kvjax[oracle]")


@pytest.fixture(scope="session")
def transformers(torch: Any) -> Any:
    reason = "the oracle is Transformers: pip install kvjax[oracle]"
    module = pytest.importorskip("transformers", reason=reason)
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


@dataclasses.dataclass(frozen=True)
class Reference:
    """A folder with a checkpoint, tokens int32[3, LENGTH], and the logits of all of them."""

    folder: Path
    tokens: np.ndarray
    logits: np.ndarray


def randomise(model: Any, torch: Any, seed: int = 0) -> Any:
    """Weights that make every part of a model count: no zero biases, norms about their neutral."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in name or ".ln_" in name
        with torch.no_grad():
            neutral = parameter if is_norm and name.endswith("weight") else 0
            parameter.copy_(neutral + 0.2 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(buffer + 0.2 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="session")
def make_reference(
    torch: Any, transformers: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Reference]:
    """Make a checkpoint of a model type and a config's fields, and run it; ``precision``: in which
    dtype."""

    def make(
        model_type: str, save: dict | None = None, precision: str = "float32", **fields: Any
    ) -> Reference:
        config = transformers.AutoConfig.for_model(model_type, **fields)
        model = randomise(transformers.AutoModelForCausalLM.from_config(config), torch)
        model = model.to(getattr(torch, (save or {}).get("dtype", "float32")))
        folder = tmp_path_factory.mktemp(model_type)
        options = {k: v for k, v in (save or {}).items() if k != "dtype"}
        model.save_pretrained(folder, **options)
        return run_reference(folder, torch, transformers, precision=precision)

    return make


def run_reference(
    folder: Path, torch: Any, transformers: Any, length: int = LENGTH, precision: str = "float32"
) -> Reference:
    """Logits of a checkpoint as Transformers loads it in this dtype, without a cache."""
    # Experts in groups have no float64.
    more = {} if precision == "float32" else {"experts_implementation": "eager"}
    dtype = getattr(torch, precision)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more).eval()
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokens = np.random.default_rng(1).integers(0, vocab, (3, length)).astype(np.int32)
    with torch.no_grad():
        logits = model(torch.tensor(tokens, dtype=torch.long)).logits.float().numpy()
    return Reference(folder, tokens, logits)


@pytest.fixture(scope="session")
def stories() -> Path:
    """A real trained checkpoint, by the environment variable KVJAX_STORIES260K."""
    folder = os.environ.get("KVJAX_STORIES260K")
    if not folder:
        pytest.skip("KVJAX_STORIES260K is not set to the folder of the stories260K checkpoint")
    return Path(folder)
