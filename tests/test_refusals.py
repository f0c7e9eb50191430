"""Wrong calls as a user makes them, where no shape checker is on the functions."""

import json
import subprocess
import sys
import textwrap

SCRIPT = """
import dataclasses, json, sys
import jax, jax.numpy as jnp, numpy as np
import kvjax
from kvjax import models

lm = models.load(sys.argv[1], dtype="float32")
found = {}


def wrong(name, call):
    try:
        call()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
    else:
        found[name] = "accepted"


def cache(**changes):
    return kvjax.init_cache(lm.config, batch=2, max_len=8, **changes)


def numbers(*shape):
    return jnp.zeros(shape)


tokens = [[1, 2, 3], [4, 5, 6]]
rows = lambda *lengths: np.asarray(lengths, np.int32)
wrong("a list of lists is fine", lambda: lm.apply(lm.params, tokens, cache(), lengths=[3, 1]))
wrong("float tokens", lambda: lm.apply(lm.params, np.ones((2, 3)), cache()))
wrong("one length", lambda: lm.apply(lm.params, tokens, cache(), lengths=np.int32(3)))
wrong("lengths of other rows", lambda: lm.apply(lm.params, tokens, cache(), lengths=rows(1, 2, 3)))
wrong("too long", lambda: lm.apply(lm.params, tokens, cache(), lengths=rows(3, 4)))
wrong("negative", lambda: lm.apply(lm.params, tokens, cache(), lengths=rows(-1, 3)))
wrong("appended", lambda: kvjax.append(
    cache(), 0, numbers(2, 2, 1, 16), numbers(2, 2, 1, 16), lengths=rows(1, 1, 1)))
wrong("heads", lambda: kvjax.append(cache(), 0, numbers(2, 4, 1, 16), numbers(2, 4, 1, 16)))
wrong("integers", lambda: kvjax.append(
    cache(), 0, jnp.zeros((2, 2, 1, 16), int), numbers(2, 2, 1, 16)))
wrong("rewind by a float", lambda: kvjax.rewind(cache(), 1.5))
wrong("rewind other rows", lambda: kvjax.rewind(cache(), rows(1, 1, 1)))
wrong("max_len", lambda: kvjax.init_cache(lm.config, max_len=16.0))
shape = dataclasses.make_dataclass(
    "Shape", ["num_hidden_layers", "num_key_value_heads", "head_dim"])(2, 2, 8)
wrong("no dtype", lambda: kvjax.init_cache(shape, max_len=8))
wrong("another model's", lambda: lm.apply(
    lm.params, tokens, kvjax.init_cache(shape, kvjax.policy(dtype="float32"), batch=2, max_len=8)))
wrong("temperature", lambda: kvjax.generate(lm, [[1]], max_new_tokens=1, temperature=None))
wrong("top_p", lambda: kvjax.generate(lm, [[1]], max_new_tokens=1, top_p="0.5"))
wrong("no stop is fine", lambda: kvjax.generate(lm, [[1]], max_new_tokens=1, stop=None))
used = kvjax.generate(lm, [[1]], max_new_tokens=1).cache
kvjax.generate(lm, [[1]], max_new_tokens=1, cache=used)
wrong("used twice", lambda: kvjax.generate(lm, [[1]], max_new_tokens=1, cache=used))
traced = jax.jit(lambda c, n: lm.apply(lm.params, jnp.asarray(tokens), c, lengths=n)[1])
wrong("traced", lambda: kvjax.check(traced(cache(), rows(3, 4))))
print(json.dumps(found))
"""


def test_wrong_calls_end_in_a_sentence(tiny_llama_dir):
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tiny_llama_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {
        "a list of lists is fine": "accepted",
        "float tokens": "ValueError: tokens must be whole numbers, got float32",
        "one length": "ValueError: lengths must be [batch=2], got []",
        "lengths of other rows": "ValueError: lengths must be [batch=2], got [3]",
        "too long": "ValueError: lengths of row 1 is 4: the call has 3 tokens",
        "negative": "ValueError: lengths of row 0 is -1: the call has 3 tokens",
        "appended": "ValueError: lengths must be [batch=2], got [3]",
        "heads": "ValueError: keys must be [batch=2, kv_heads=2, new, head_dim=16], "
        "got [2, 4, 1, 16]",
        "integers": "ValueError: keys must be floating-point numbers, got int32",
        "rewind by a float": "ValueError: rewind takes a whole number, or int32[batch=2], "
        "got float32[]",
        "rewind other rows": "ValueError: rewind takes a whole number, or int32[batch=2], "
        "got int32[3]",
        "max_len": "ValueError: max_len must be a whole number, at least 1, got 16.0",
        "no dtype": "ValueError: the config has no dtype: name one, such as "
        'policy("static", dtype="float32")',
        "another model's": "ValueError: layer 0 of the cache has kv_heads=2, head_dim=8, the "
        "model 2 and 16: make it with init_cache(lm.config, ...)",
        "temperature": "ValueError: temperature must be a finite number, at least 0, got None",
        "top_p": "ValueError: top_p must be above 0 and at most 1, got '0.5'",
        "no stop is fine": "accepted",
        "used twice": "ValueError: the cache given was donated to an earlier call: go on with "
        "that call's result.cache, or give a kvjax.fork of it next time",
        "traced": "ValueError: lengths of row(s) 1 was negative or above the tokens of its call",
    }
