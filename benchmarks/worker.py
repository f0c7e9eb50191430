"""One engine in a process of its own, asked over standard input and answering over standard output.

A line holds one JSON object: `{"op": name, "args": {...}}` is answered by `{"value": ...,
"peak_bytes": n}` or `{"error": traceback}`. Only the standard library and the engine's own
packages are imported, so a worker can run in another interpreter than its parent.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from typing import Any, TextIO

from benchmarks import memory

CLASSES = {
    "kvjax": ("engine_kvjax", "KvjaxEngine"),
    "transformers": ("engine_transformers", "TransformersEngine"),
    "llama_cpp": ("engine_llama_cpp", "LlamaCppEngine"),
    "openvino": ("engine_openvino", "OpenvinoEngine"),
    "mlx": ("engine_mlx", "MlxEngine"),
}
"""Module and class by family; a module is imported by its own worker alone."""


def build(engine: str, checkpoint: str, dtype: str) -> Any:
    """Load an engine by its name: a family, and with dashes what its class takes besides."""
    family, *variant = engine.split("-")
    module, name = CLASSES[family]
    found = getattr(importlib.import_module(f"benchmarks.{module}"), name)
    return found(checkpoint, dtype, *variant)


def serve(engine: Any, requests: TextIO, replies: TextIO) -> None:
    """Answer requests until the input ends."""
    for line in requests:
        request = json.loads(line)
        resettable = memory.mark_peak()
        try:
            value = getattr(engine, request["op"])(**request["args"])
            device = engine.device_peak_bytes()
            reply = {
                "value": value,
                "peak_bytes": memory.peak_bytes() if device is None else device,
                "peak_resettable": resettable and device is None,
            }
        except Exception:
            # The parent raises it: a worker has nobody else to tell.
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--dtype", required=True)
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What a library prints must not land between two replies.
    os.dup2(2, 1)
    try:
        engine = build(options.engine, options.checkpoint, options.dtype)
    except Exception:
        replies.write(json.dumps({"error": traceback.format_exc()}) + "\n")
        replies.flush()
        return
    replies.write(json.dumps({"value": None, "peak_bytes": memory.peak_bytes()}) + "\n")
    replies.flush()
    serve(engine, sys.stdin, replies)


if __name__ == "__main__":
    main()
