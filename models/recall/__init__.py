"""A model that remembers facts: its files, its task, the recipe that trained it, and its measure.

Llama, 370,000 weights in bfloat16: 2 layers, hidden 128, 2 heads of 64 channels, 1,024 positions.
Its tokens are ids of keys and values (``.task``), so there is no tokenizer. ``.train`` makes it
again in ten minutes on one processor core; ``.measure`` asks it, through any cache.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
"""The checkpoint, as ``kvjax.models.load`` takes it."""
