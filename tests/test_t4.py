"""A GPU without bfloat16 and without kernels: the dtype that models are loaded in."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax import models
from kvjax.core.target import Target, tracing_for
from kvjax.layouts import Ring
from kvjax.models.loading import compute_dtype, read_config
from tests.checkpoints import write_llama
from tests.test_kernels import agree, filled

T4 = Target("gpu", (7, 5))


def written(folder, dtype=jnp.bfloat16, **factors):
    """A bfloat16 checkpoint with some of its tensors scaled."""
    write_llama(folder, dtype=dtype, torch_dtype=jnp.dtype(dtype).name)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, factor in factors.items():
        found = next(each for each in tensors if name in each)
        tensors[found] = (tensors[found].astype(np.float32) * factor).astype(dtype)
    save_file(tensors, file, {"format": "pt"})
    return str(folder)


def loaded(folder, capsys, target=T4, **given):
    with tracing_for(target):
        lm = models.load(folder, **given)
    leaves = {str(x.dtype) for x in lm.params["model"]["layers"]["0"]["mlp"]["up_proj"].values()}
    assert leaves == {lm.config.dtype}
    return lm, capsys.readouterr().err


@pytest.mark.parametrize(
    ("factors", "dtype", "told"),
    [
        ({}, "float16", "computing in float16\n"),
        ({"layers.1.mlp.up_proj": 0.0}, "float16", "computing in float16\n"),
        (
            {"layers.1.mlp.up_proj": 1e7},
            "float32",
            "up_proj.weight is not in the range",
        ),
        (
            {"layers.0.self_attn.q": 1e-7},
            "float32",
            "q_proj.weight is not in the range",
        ),
        (
            {"layers.0.self_attn.q": 1e-12},
            "float32",
            "q_proj.weight is not in the range",
        ),
    ],
    ids=["it fits", "zeros", "too large", "too small", "zeros in float16"],
)
def test_a_checkpoint_of_bfloat16(tmp_path, capsys, factors, dtype, told):
    """Loaded in float16 if its numbers are in range, otherwise in float32, with a message."""
    lm, line = loaded(written(tmp_path / "llama", **factors), capsys)
    assert lm.config.dtype == dtype
    assert line.count("\n") == 1 and "has no bfloat16, computing in " in line and told in line
    assert kvjax.init_cache(lm.config, max_len=16).layers[0].policy.keys.dtype == dtype


@pytest.mark.parametrize(
    ("given", "target", "stored", "dtype"),
    [
        ({"dtype": "bfloat16"}, T4, jnp.bfloat16, "bfloat16"),
        ({}, T4, np.float32, "float32"),
        ({}, T4, np.float16, "float16"),
        ({}, Target("gpu", (8, 9)), jnp.bfloat16, "bfloat16"),
        ({}, Target("tpu"), jnp.bfloat16, "bfloat16"),
        ({}, Target("cpu"), jnp.bfloat16, "float32"),
    ],
    ids=str,
)
def test_dtypes_that_do_not_change(tmp_path, capsys, given, target, stored, dtype):
    """Explicit dtypes, other checkpoints and other devices do not change, without a message."""
    lm, line = loaded(written(tmp_path / "llama", stored), capsys, target, **given)
    assert lm.config.dtype == dtype and not line


def test_on_a_mesh_too(tmp_path, capsys):
    """The whole tensor decides, not the shard of a device."""
    mesh = kvjax.make_mesh(tensor=2)
    lm, line = loaded(written(tmp_path / "fits"), capsys, mesh=mesh)
    assert lm.config.dtype == "float16" and "float16" in line
    large = written(tmp_path / "large", **{"layers.1.mlp.up_proj": 1e7})
    lm, line = loaded(large, capsys, mesh=mesh)
    assert lm.config.dtype == "float32" and "up_proj.weight is not in" in line


@pytest.mark.slow(but=("static-blocks",))
@pytest.mark.parametrize("path", ["buckets", "blocks"])
@pytest.mark.parametrize("policy", ["static", "ring", "paged"])
def test_nan_in_empty_slots_is_ignored(policy, path):
    """An empty slot holds NaN. Products of few queries leave it out because its weight is 0."""
    chosen = {
        "static": kvjax.policy("static"),
        "ring": kvjax.CachePolicy(Ring(32, sinks=4, slack=44)),
        "paged": kvjax.policy("paged", pages=32, page_size=16),
    }[policy]
    with tracing_for(T4):
        cache = filled(chosen, dtype="float16")
        for new in (1, 4):
            agree(path, cache, new=new, tolerance=2e-3)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "t5"])
def test_models_whose_activations_exceed_float16(tmp_path, kind):
    """They are recognized by their model type, and computed in float32."""
    folder = write_llama(tmp_path / "llama", torch_dtype="bfloat16")
    config = read_config(folder)
    assert compute_dtype(config, None, T4) == "float16"
    object.__setattr__(config, "model_type", kind)
    assert compute_dtype(config, None, T4) == "float32"
    assert compute_dtype(config, "float16", T4) == "float16"
