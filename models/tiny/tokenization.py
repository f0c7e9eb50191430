"""The tokenizer of the embedded model: byte-level BPE, trained only on the training text."""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

END = "<|endoftext|>"
"""Precedes every document. Its id is 0."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Train BPE merges. The vocabulary contains ``END``, the 256 bytes, and the merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path, context: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``.

    The tokenizer does not add a BOS token: training windows start anywhere in a document, and so
    can prompts.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": END,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": context,
        "pad_token": END,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )
