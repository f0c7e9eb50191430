"""A model trained for key-value retrieval: its files, task, training recipe and evaluation.

It is a Llama model with 370,000 bfloat16 parameters: 2 layers, hidden size 128, 2 heads of 64
channels, and a context of 1,024 tokens. Its tokens are ids of keys and values (``.measure``), so it
has no tokenizer. ``.train`` trains it in ten minutes on one CPU core. ``.measure`` evaluates it
with any cache.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
"""The checkpoint's folder, for ``kvjax.models.load``."""
