"""Read a checkpoint's generation settings: end-of-sequence tokens and sampling parameters."""

from pathlib import Path

from kvjax.generation.model import GenerationDefaults

from .json_fields import Fields, read_json
from .multimodal import read_text_fields

_FAMILY_IDS = {
    "llama": (1, 2),
    "llama4_text": (1, 2),
    "mistral": (1, 2),
    "mixtral": (1, 2),
    "gemma2": (2, 1),
    "gemma3_text": (2, 1),
    "gemma3n_text": (2, 1),
    "gemma4_text": (2, 1),
    "gpt2": (50256, 50256),
    "gpt_neox": (0, 2),
    "phi3": (1, 32000),
    "olmo2": (None, 50279),
    "t5": (None, 1),
}
"""BOS and EOS token ids if no file has them: the defaults of Transformers' config classes."""


def read_generation(folder: Path, model_type: str) -> GenerationDefaults:
    """Read ``generation_config.json``. Missing token ids are taken from ``config.json``.

    Raises:
      CheckpointError: if a file can't be read or a field has the wrong type.
    """
    config = read_text_fields(folder)
    file = folder / "generation_config.json"
    fields = Fields(file, read_json(file) if file.exists() else {})
    bos, eos = (None, None) if fields.values else _FAMILY_IDS.get(model_type, (None, None))

    def source(name: str) -> Fields:
        return fields if fields.raw(name) is not None else config

    def setting(name: str) -> float | None:
        return None if fields.raw(name) is None else fields.number(name, positive=False)

    def token(name: str, default: int | None = None) -> int | None:
        if name in config.values:
            default = None
        value = source(name).raw(name, default)
        if value == -1:
            # Some files use -1 for no token.
            return None
        return None if value is None else source(name).integer(name, default, least=0)

    return GenerationDefaults(
        eos_token_ids=_ids(source("eos_token_id"), "eos_token_id", eos, config),
        bos_token_id=token("bos_token_id", bos),
        pad_token_id=token("pad_token_id"),
        do_sample=None if fields.raw("do_sample") is None else fields.flag("do_sample", False),
        temperature=setting("temperature"),
        top_k=None if fields.raw("top_k") is None else fields.integer("top_k", least=0),
        top_p=setting("top_p"),
        min_p=setting("min_p"),
        repetition_penalty=setting("repetition_penalty"),
        start_token_id=token("decoder_start_token_id"),
    )


def _ids(fields: Fields, name: str, default: int | None, config: Fields) -> tuple[int, ...]:
    value = fields.raw(name, None if name in config.values else default)
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(x, int) and not isinstance(x, bool) for x in values):
        raise fields.wrong(name, "a token id or a list of them")
    return tuple(x for x in values if x >= 0)
