"""The text parts of multimodal checkpoints: logits are those that the whole model gives for text
alone, in float64, in each layout that such files have had."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax import models
from tests.oracle.conftest import LENGTH, Reference, randomise, run_reference
from tests.oracle.test_families import GEMMA3N, GEMMA4, LLAMA4, apart
from tests.oracle.test_logits import SMALL

TOLERANCE = 1e-5
"""Of logits, absolute, as of the families alone."""

VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 14,
}  # fmt: skip
NO_PARTS = {"vision_config": None, "audio_config": None}
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
OLD = ((r"^model\.language_model\.", "language_model.model."), (r"^lm_head", "language_model.lm_head"),
       (r"^model\.(?=vision|multi_modal)", ""))  # fmt: skip
"""Names as Transformers had them before version 4.52."""
OLD_QWEN = ((r"^model\.language_model\.", "model."), (r"^model\.visual", "visual"))

CASES: dict[str, tuple[str, dict[str, Any], tuple[tuple[str, str], ...]]] = {
    "gemma3": (
        "gemma3",
        {
            "text_config": {
                **SMALL, "head_dim": 8, "sliding_window": 7, "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 66,
        },
        OLD,
    ),
    "gemma3n": ("gemma3n", {"text_config": GEMMA3N}, ()),
    "gemma4": ("gemma4", {"text_config": GEMMA4, **NO_PARTS, "image_token_id": 66}, ()),
    "gemma4_unified": (
        "gemma4_unified",
        {
            "text_config": {
                k: v for k, v in GEMMA4.items()
                if k not in ("vocab_size_per_layer_input", "hidden_size_per_layer_input")
            },
            **NO_PARTS,
        },
        (),
    ),
    "llama4": (
        "llama4",
        {
            "text_config": LLAMA4, "image_token_index": 66,
            "vision_config": {
                **VISION, "vision_output_dim": 16, "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        },
        (),
    ),
    "mistral3": (
        "mistral3",
        {
            "text_config": {**SMALL, "model_type": "mistral", "head_dim": 8, "sliding_window": None},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False, "vision_feature_layer": -1, "image_token_index": 66,
        },
        OLD,
    ),
    "llava": (
        "llava",
        {
            "text_config": {**SMALL, "model_type": "llama"}, "image_token_index": 66,
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
        },
        OLD,
    ),
    "qwen2_vl": (
        "qwen2_vl",
        {
            "text_config": {**SMALL, "rope_parameters": AXES},
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
        },
        OLD_QWEN,
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": {
                **SMALL, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1,
                "rope_parameters": {**AXES, "rope_type": "yarn", "factor": 4.0,
                                    "original_max_position_embeddings": 16},
            },
            "vision_config": {**QWEN_VISION, "fullatt_block_indexes": [0]},
            "tie_word_embeddings": True,
        },
        OLD_QWEN,
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {
            "text_config": {
                **SMALL, "head_dim": 16,
                "rope_parameters": {**AXES, "mrope_section": [3, 3, 2], "mrope_interleaved": True},
            },
            "vision_config": {
                **QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
            },
        },
        (),
    ),
    "smolvlm": (
        "smolvlm",
        {
            "text_config": {**SMALL, "model_type": "llama"}, "image_token_id": 66,
            "vision_config": VISION, "scale_factor": 2, "tie_word_embeddings": True,
        },
        (),
    ),
}  # fmt: skip


def make(name: str, torch: Any, transformers: Any, folder: Path) -> Reference:
    """A whole model's checkpoint and, in float64, its logits of text."""
    model_type, fields, _ = CASES[name]
    config = transformers.AutoConfig.for_model(model_type, **fields)
    model = randomise(transformers.AutoModelForImageTextToText.from_config(config), torch)
    model.save_pretrained(folder)
    whole = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    # Not the last token, which stands for an image.
    vocab = fields["text_config"]["vocab_size"] - 1
    tokens = np.random.default_rng(1).integers(0, vocab, (3, LENGTH)).astype(np.int32)
    with torch.no_grad():
        logits = whole(input_ids=torch.tensor(tokens, dtype=torch.long)).logits.float().numpy()
    return Reference(folder, tokens, logits)


@pytest.fixture(scope="module", params=list(CASES))
def case(
    request: pytest.FixtureRequest,
    torch: Any,
    transformers: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    folder = tmp_path_factory.mktemp(request.param) / "whole"
    return request.param, make(request.param, torch, transformers, folder)


def check(folder: Path, reference: Reference) -> models.LanguageModel:
    lm = models.load(folder, dtype="float32")
    logits = jax.jit(lm.apply)(lm.params, jnp.asarray(reference.tokens))
    assert apart(np.asarray(logits), reference.logits) <= TOLERANCE
    return lm


def test_text_of_the_whole_model(case: Any, capsys: pytest.CaptureFixture) -> None:
    name, reference = case
    check(reference.folder, reference)
    names = load_file(reference.folder / "model.safetensors")
    others = any(re.search(r"vis|multi_modal|embed_(vis|aud)", each) for each in names)
    assert ("only the text part is loaded" in capsys.readouterr().err) == others


def test_the_older_layout(case: Any, tmp_path: Path) -> None:
    name, reference = case
    rules = CASES[name][2]
    if not rules:
        pytest.skip("this one has had one layout")
    tensors = {}
    for key, value in load_file(reference.folder / "model.safetensors").items():
        for pattern, other in rules:
            key = re.sub(pattern, other, key)
        tensors[key] = value
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((reference.folder / "config.json").read_text())
    if rules is OLD_QWEN:  # whose configs were flat
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        kind = rope.pop("rope_type")
        config = {**text, "rope_theta": rope.pop("rope_theta"), **config}
        config["rope_scaling"] = {**rope, "type": "mrope" if kind == "default" else kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(tmp_path, reference)


def test_saved_as_a_text_model(case: Any, torch: Any, transformers: Any, tmp_path: Path) -> None:
    """Transformers reads what is saved as the text model, by itself."""
    name, reference = case
    lm = models.load(reference.folder, dtype="float32")
    lm.save(tmp_path / "text")
    again = run_reference(tmp_path / "text", torch, transformers, precision="float64")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad():
        found = model(torch.tensor(reference.tokens, dtype=torch.long)).logits.float().numpy()
    assert apart(found, reference.logits) <= 1e-6 and again.folder
    written = json.loads((tmp_path / "text" / "config.json").read_text())
    assert [type(model).__name__] == written["architectures"]


def test_what_a_file_leaves_out(transformers: Any, tmp_path: Path) -> None:
    for name in CASES:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        whole = transformers.AutoConfig.from_pretrained(tmp_path)
        theirs, ours = whole.text_config, models.read_config(tmp_path)
        for field in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
        ):  # fmt: skip
            assert getattr(ours, field) == getattr(theirs, field), (name, field)
        assert ours.tie_word_embeddings == whole.tie_word_embeddings, name
        ropes = theirs.rope_parameters
        rope = ropes.get("full_attention", ropes)
        assert (ours.rope.kind, ours.rope.theta) == (rope["rope_type"], rope["rope_theta"]), name
        window = getattr(theirs, "sliding_window", None)
        if "sliding_attention" in (getattr(theirs, "layer_types", None) or ()):
            assert window in ours.windows, name
