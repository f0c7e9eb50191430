"""What is said of a model's generation: which tokens end a text, and how to sample."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationDefaults:
    """Token ids, and the sampling settings that ``generation_config.json`` gives; None where it
    is silent. ``start_token_id``: what a text begins with that a decoder behind an encoder writes.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    start_token_id: int | None = None
