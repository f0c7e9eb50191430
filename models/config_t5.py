"""Read ``config.json`` of T5."""

from .config_families import T5Config
from .config_parts import read_dtype
from .fields import Fields
from .layers import ACTIVATIONS
from .supported import refused


def read_t5(config: Fields) -> T5Config:
    if not config.flag("is_encoder_decoder", True):
        raise refused(config, "is_encoder_decoder")
    layers, heads = config.integer("num_layers", 6), config.integer("num_heads", 8)
    first, _, last = str(config.raw("feed_forward_proj", "relu")).rpartition("-")
    if first not in ("", "gated") or last not in ACTIVATIONS:
        raise config.wrong("feed_forward_proj", f"one of {_kinds()}")
    # The name of version 1.1 means another function than that of Transformers' `gelu`.
    activation = "gelu_new" if (first, last) == ("gated", "gelu") else last
    buckets = config.integer("relative_attention_num_buckets", 32, least=4)
    farthest = config.integer("relative_attention_max_distance", 128)
    if farthest <= buckets // 2:
        raise config.wrong("relative_attention_max_distance", f"above {buckets // 2}, half of them")
    return T5Config(
        model_type="t5",
        vocab_size=config.integer("vocab_size", 32128),
        hidden_size=config.integer("d_model", 512),
        intermediate_size=config.integer("d_ff", 2048),
        num_hidden_layers=config.integer("num_decoder_layers", layers),
        encoder_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=config.integer("d_kv", 64),
        layer_norm_epsilon=config.number("layer_norm_epsilon", 1e-6, positive=False),
        activation=config.choice("dense_act_fn", activation, ACTIVATIONS),
        gated=config.flag("is_gated_act", first == "gated"),
        # They are tied but where a file has a head that is another, whatever this field says: that
        # is how files of version 1.1 tell that nothing is divided.
        tie_word_embeddings=True,
        scale_outputs=config.flag(
            "scale_decoder_outputs", config.flag("tie_word_embeddings", True)
        ),
        buckets=buckets,
        max_distance=farthest,
        dtype=read_dtype(config),
    )


def _kinds() -> str:
    return ", ".join(f"{gate}{name}" for gate in ("", "gated-") for name in sorted(ACTIVATIONS))
