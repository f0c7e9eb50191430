"""The text parts of multimodal checkpoints: logits are those that the whole model gives for text
alone, in float64, in each layout that such files have had."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax import models
from tests.oracle.conftest import LENGTH, Reference, randomise
from tests.oracle.test_families import COHERE2, GEMMA3N, GEMMA4, LLAMA4
from tests.oracle.test_logits import SMALL, TOLERANCE, worst

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
OLD = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head", "language_model.lm_head"),
    (r"^model\.(?=vision|multi_modal)", ""),
)
"""Names as Transformers had them before version 4.52."""
OLD_QWEN = ((r"^model\.language_model\.", "model."), (r"^model\.visual", "visual"))

CASES: dict[str, tuple[str, dict[str, Any], tuple[tuple[str, str], ...]]] = {
    # With another logit_scale than 1, these two differ: see models/multimodal.py.
    "aya_vision": (
        "aya_vision",
        {
            "text_config": {**COHERE2, "model_type": "cohere2", "logit_scale": 1.0},
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
            "image_token_index": 66,
        },
        OLD,
    ),
    "cohere2_vision": (
        "cohere2_vision",
        {
            "text_config": {**COHERE2, "model_type": "cohere2", "logit_scale": 1.0},
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
            "image_token_id": 66,
        },
        (),
    ),
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
            "text_config": {
                **SMALL, "model_type": "mistral", "head_dim": 8, "sliding_window": None,
            },
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


def run(model: Any, torch: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens, dtype=torch.long)).logits.float().numpy()


def make(name: str, torch: Any, transformers: Any, folder: Path) -> Reference:
    """A whole model's checkpoint and, in float64, its logits of text."""
    model_type, fields, _ = CASES[name]
    # Not the last token, which stands for an image.
    vocab = fields["text_config"]["vocab_size"] - 1
    tokens = np.random.default_rng(1).integers(0, vocab, (3, LENGTH)).astype(np.int32)
    config = transformers.AutoConfig.for_model(model_type, **fields)
    exact: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
    if name == "gemma3n":
        # Its encoder of images needs another package: the text part alone, under the whole's names.
        text = transformers.AutoModelForCausalLM.from_config(config.text_config)
        randomise(text, torch).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **exact).eval()
        config.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        named = {re.sub(r"^model\.", "model.language_model.", k): v for k, v in tensors.items()}
        named["model.vision_tower.x"] = np.zeros(2, np.float32)
        save_file(named, folder / "model.safetensors")
    else:
        auto = transformers.AutoModelForImageTextToText
        randomise(auto.from_config(config), torch).save_pretrained(folder)
        model = auto.from_pretrained(folder, **exact).eval()
    return Reference(folder, tokens, run(model, torch, tokens))


@pytest.fixture(scope="module", params=list(CASES))
def case(
    request: pytest.FixtureRequest,
    torch: Any,
    transformers: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    folder = tmp_path_factory.mktemp(request.param) / "whole"
    return request.param, make(request.param, torch, transformers, folder)


def check(folder: Path, reference: Reference) -> None:
    lm = models.load(folder, dtype="float32")
    logits = jax.jit(lm.apply)(lm.params, jnp.asarray(reference.tokens))
    assert worst(np.asarray(logits), reference.logits) <= TOLERANCE


def test_text_of_the_whole_model(case: Any, capsys: pytest.CaptureFixture) -> None:
    _, reference = case
    check(reference.folder, reference)
    names = load_file(reference.folder / "model.safetensors")
    others = any(re.search(r"vis|multi_modal|embed_(vis|aud)", each) for each in names)
    assert ("only the text part is loaded" in capsys.readouterr().err) == others


@pytest.mark.parametrize("name", [name for name, (_, _, old) in CASES.items() if old])
def test_the_older_layout(name: str, torch: Any, transformers: Any, tmp_path: Path) -> None:
    reference = make(name, torch, transformers, tmp_path / "whole")
    tensors = {}
    for key, value in load_file(reference.folder / "model.safetensors").items():
        for pattern, other in CASES[name][2]:
            key = re.sub(pattern, other, key)
        tensors[key] = value
    (tmp_path / "old").mkdir()
    save_file(tensors, tmp_path / "old" / "model.safetensors")
    config = json.loads((reference.folder / "config.json").read_text())
    if CASES[name][2] is OLD_QWEN:  # whose configs were flat
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        kind = rope.pop("rope_type")
        config = {**text, "rope_theta": rope.pop("rope_theta"), **config}
        config["rope_scaling"] = {**rope, "type": "mrope" if kind == "default" else kind}
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    check(tmp_path / "old", reference)


def test_saved_as_a_text_model(case: Any, torch: Any, transformers: Any, tmp_path: Path) -> None:
    """Transformers reads what is saved as a text model, by itself."""
    _, reference = case
    models.load(reference.folder, dtype="float32").save(tmp_path / "text")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", dtype=torch.float64, experts_implementation="eager",
        output_loading_info=True,
    )  # fmt: skip
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert worst(run(model.eval(), torch, reference.tokens), reference.logits) <= 1e-6
    written = json.loads((tmp_path / "text" / "config.json").read_text())
    assert [type(model).__name__] == written["architectures"]


def test_what_a_file_leaves_out(transformers: Any, tmp_path: Path) -> None:
    for name in CASES:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        whole = transformers.AutoConfig.from_pretrained(tmp_path)
        theirs, ours = whole.text_config, models.read_config(tmp_path)
        for field in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings",
        ):  # fmt: skip
            assert getattr(ours, field) == getattr(theirs, field), (name, field)
        epsilon = "layer_norm_eps" if hasattr(theirs, "layer_norm_eps") else "rms_norm_eps"
        assert ours.rms_norm_eps == getattr(theirs, epsilon), name
        assert ours.tie_word_embeddings == whole.tie_word_embeddings, name
        ropes = theirs.rope_parameters
        rope = ropes.get("full_attention", ropes)
        assert (ours.rope.rope_type, ours.rope.theta) == (rope["rope_type"], rope["rope_theta"]), (
            name
        )
        window = getattr(theirs, "sliding_window", None)
        if "sliding_attention" in (getattr(theirs, "layer_types", None) or ()):
            assert window in ours.windows, name
