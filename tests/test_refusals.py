"""Wrong calls as a user makes them, where no shape checker is on the functions."""

import json
import subprocess
import sys
import textwrap

SCRIPT = """
import dataclasses, json, sys
import jax, jax.numpy as jnp, numpy as np
import kvjax
from kvjax.layouts import Dense, Ring
from kvjax import models

lm = models.load(sys.argv[1], dtype="float32")
found = {}


def wrong(name, call):
    try:
        call()
    except Exception as error:
        kind = ValueError if isinstance(error, kvjax.ArgumentError) else type(error)
        found[name] = f"{kind.__name__}: {error}"
    else:
        found[name] = "accepted"


def cache(**changes):
    return kvjax.init_cache(lm.config, batch=2, max_len=8, **changes)


def numbers(*shape):
    return jnp.zeros(shape)


tokens = [[1, 2, 3], [4, 5, 6]]
rows = lambda *lengths: np.asarray(lengths, np.int32)
wrong("a list of lists is fine", lambda: lm.apply(lm.params, tokens, cache(), lengths=[3, 1]))
wrong("and inside jit", lambda: jax.jit(lambda t: lm.apply(
    lm.params, t, cache(), lengths=[3, 1]))(np.asarray(tokens)))
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
plain = lambda: kvjax.init_cache(lm.config, batch=2, max_len=8)
wrong("advance back", lambda: kvjax.advance(plain(), -3))
wrong("advance by a part", lambda: kvjax.advance(plain(), 2.7))
one = numbers(2, 2, 1, 16)
called = lambda **settings: kvjax.append(plain(), 0, one, one, **settings)
wrong("advance what was not appended", lambda: kvjax.advance(plain(), 1))
wrong("advance by more", lambda: kvjax.advance(called(), 2))
wrong("advance before the last layer", lambda: kvjax.advance(called(), 1))
wrong("append a layer twice", lambda: kvjax.append(called(), 0, one, one))
wrong("append more to the next layer", lambda: kvjax.append(
    called(), 1, numbers(2, 2, 3, 16), numbers(2, 2, 3, 16)))
wrong("attend before append", lambda: kvjax.attend(numbers(2, 4, 1, 16), plain(), 0))
wrong("attend to the next layer", lambda: kvjax.attend(numbers(2, 4, 1, 16), called(), 1))
wrong("attend with more", lambda: kvjax.attend(numbers(2, 4, 2, 16), called(), 0))
wrong("look back in a call", lambda: kvjax.attend(
    numbers(2, 4, 1, 16), called(), 0, causal=False))
wrong("rewind in a call", lambda: kvjax.rewind(called(), 1))
wrong("other lengths", lambda: kvjax.attend(
    numbers(2, 4, 1, 16), called(), 0, lengths=rows(1, 0)))
ring = kvjax.init_cache(lm.config, kvjax.policy("sliding_window", window=4, slack=2), batch=2)
wrong("more than a ring's slack", lambda: kvjax.append(
    ring, 0, numbers(2, 2, 9, 16), numbers(2, 2, 9, 16)))
wrong("lengths in parts", lambda: called(lengths=np.array([0.5, 1.0])))
wrong("lengths of a query", lambda: kvjax.attend(
    numbers(2, 4, 1, 16), called(), 0, lengths=rows(5, -1)))
wrong("reset by number", lambda: kvjax.reset(plain(), [0, 1]))
wrong("rewind one back", lambda: kvjax.rewind(plain(), rows(-1, 0)))
wrong("rewind nothing", lambda: kvjax.rewind(plain(), None))
wrong("rewind very far", lambda: kvjax.check(kvjax.rewind(plain(), 2**40)))
wrong("select nothing", lambda: kvjax.select(plain(), None))
wrong("select a name", lambda: kvjax.select(plain(), "a"))
wrong("concatenate one", lambda: kvjax.concatenate(plain()))
wrong("a window of 8.0", lambda: kvjax.policy("sliding_window", window=8.0))
wrong("a window in words", lambda: kvjax.layouts.Ring("8"))
wrong("a true window", lambda: kvjax.layouts.Ring(window=True))
wrong("slots in parts", lambda: kvjax.layouts.Dense(8.0))
wrong("growing down", lambda: kvjax.layouts.Dense(8, grows_to=4))
wrong("a layout alone", lambda: kvjax.init_cache(lm.config, kvjax.layouts.Ring(8), max_len=8))
wrong("layouts in a list", lambda: kvjax.init_cache(
    lm.config, [kvjax.layouts.Ring(8), kvjax.layouts.Dense()], max_len=8))
wrong("names in a list are fine", lambda: kvjax.init_cache(
    lm.config, ["static", "dynamic"], max_len=8))
wrong("a hybrid in a list", lambda: kvjax.init_cache(lm.config, ["static", "hybrid"], max_len=8))
wrong("a name for a layout", lambda: kvjax.CachePolicy("static"))
wrong("a name for a codec", lambda: kvjax.CachePolicy(kvjax.layouts.Dense(), "bfloat16"))
wrong("no policy", lambda: kvjax.convert(plain(), None))
wrong("a window in parts", lambda: kvjax.attend(numbers(2, 4, 1, 16), called(), 0, window=2.5))
wrong("other rows", lambda: kvjax.attend(numbers(3, 4, 1, 16), plain(), 0))
wrong("no queries", lambda: kvjax.attend(numbers(2, 4, 0, 16), plain(), 0))
wrong("three axes", lambda: kvjax.attend(numbers(4, 1, 16), plain(), 0))
wrong("lists", lambda: kvjax.append(plain(), 0, [[1.0]], [[1.0]]))
wrong("layer 1.0", lambda: kvjax.read(plain(), 1.0))
wrong("last_only traced", lambda: jax.jit(lm.apply)(lm.params, tokens, plain(), last_only=True))
wrong("a fixed policy that is too small", lambda: kvjax.generate(
    lm, [[1] * 5], max_new_tokens=7, cache=kvjax.CachePolicy(kvjax.layouts.Dense(10))))
wrong("a fixed policy is fine", lambda: kvjax.generate(
    lm, [[1] * 5], max_new_tokens=6, cache=kvjax.CachePolicy(kvjax.layouts.Dense(10))))
grown = kvjax.init_cache(lm.config, "dynamic")
kvjax.grow(grown, 512)
wrong("used up by grow", lambda: kvjax.generate(lm, [[1]], max_new_tokens=1, cache=grown))
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
        "and inside jit": "accepted",
        "float tokens": "ValueError: tokens must be whole numbers, got float32",
        "one length": "ValueError: lengths must be [batch=2], got []",
        "lengths of other rows": "ValueError: lengths must be [batch=2], got [3]",
        "too long": "ValueError: lengths[1] is 4, but the call has 3 token(s)",
        "negative": "ValueError: lengths[0] is -1, but the call has 3 token(s)",
        "appended": "ValueError: lengths must be [batch=2], got [3]",
        "heads": "ValueError: keys must be [batch=2, kv_heads=2, new, head_dim=16], "
        "got [2, 4, 1, 16]",
        "integers": "ValueError: keys must be floating-point numbers, got int32",
        "rewind by a float": "ValueError: tokens must be an integer, or one per row, "
        "got array(1.5)",
        "rewind other rows": "ValueError: tokens must be an integer or int32[batch=2], "
        "got shape [3]",
        "max_len": "ValueError: max_len must be an integer >= 1, got 16.0",
        "no dtype": "ValueError: the config has no dtype: name one, such as "
        'policy("static", dtype="float32")',
        "another model's": "ValueError: layer 0 of the cache has kv_heads=2, head_dim=8, but "
        "the model has 2 and 16: make the cache with init_cache(lm.config, ...)",
        "temperature": "ValueError: temperature must be a finite number, at least 0, got None",
        "top_p": "ValueError: top_p must be above 0 and at most 1, got '0.5'",
        "no stop is fine": "accepted",
        "advance back": "ValueError: new must be an integer >= 0, got -3",
        "advance by a part": "ValueError: new must be an integer >= 0, got 2.7",
        "advance what was not appended": "ValueError: nothing to advance: no tokens were "
        "appended since the last advance",
        "advance by more": "ValueError: advance by 2, but 1 token(s) a row were appended",
        "advance before the last layer": "ValueError: advance, but 1 of 2 layers with keys and "
        "values of their own were not appended to, the first is number 1",
        "append a layer twice": "ValueError: layer 0 has been appended to in this call: "
        "end the call with kvjax.advance(cache, 1) first",
        "append more to the next layer": "ValueError: 3 token(s), but the call began with 1: give "
        "all layers of a call the same tokens",
        "attend before append": "ValueError: layer 0 has no new tokens: call kvjax.append before "
        "attend, and advance after it, or pass causal=False to attend to the tokens of earlier "
        "calls",
        "attend to the next layer": "ValueError: layer 1 has no new tokens: call kvjax.append "
        "before attend, and advance after it, or pass causal=False to attend to the tokens of "
        "earlier calls",
        "attend with more": "ValueError: queries of 2 token(s), but 1 were appended",
        "look back in a call": "ValueError: causal=False attends to the tokens of earlier "
        "calls, but a call is open: call kvjax.advance(cache, 1) first",
        "rewind in a call": "ValueError: kvjax.rewind: a call has begun, and its 1 token(s) a row "
        "do not count yet: append them to all layers, then call kvjax.advance(cache, 1) first",
        "other lengths": "ValueError: lengths of row 1 differ from the lengths of the call's first "
        "append, which are used; kvjax.rewind removes tokens",
        "more than a ring's slack": "ValueError: 9 tokens in a call, but the ring has slack for "
        "3: append them in chunks of at most 3, or give the ring more slack (slack=8)",
        "lengths in parts": "ValueError: lengths must be integers, got float64",
        "lengths of a query": "ValueError: lengths[0] is 5, but the call has 1 token(s)",
        "reset by number": "ValueError: rows must be bool[batch=2], got [0, 1]",
        "rewind one back": "ValueError: tokens must be >= 0, got -1",
        "rewind nothing": "ValueError: tokens must be an integer, or one per row, got "
        "array(None, dtype=object)",
        "rewind very far": "ValueError: row(s) 0, 1 were to forget more tokens than "
        "kvjax.rewindable allows, and are unchanged",
        "select nothing": "ValueError: rows must be a list of integers, got array(None, "
        "dtype=object)",
        "select a name": "ValueError: rows must be a list of integers, got array('a', dtype='<U1')",
        "concatenate one": "ValueError: caches must be a list of caches, got a KVCache",
        "a window of 8.0": "ValueError: window must be an integer >= 1, got 8.0",
        "a window in words": "ValueError: window must be an integer >= 1, got '8'",
        "a true window": "ValueError: window must be an integer >= 1, got True",
        "slots in parts": "ValueError: max_len must be an integer >= 1, got 8.0",
        "growing down": "ValueError: grows_to must be an integer >= 8, got 4",
        "a layout alone": "ValueError: a policy, its name or a list of policies is needed, not "
        "a Ring; make a layout into a policy with CachePolicy(layout)",
        "layouts in a list": "ValueError: the policy of layer 0 must be a CachePolicy, not a Ring",
        "names in a list are fine": "accepted",
        "a hybrid in a list": "ValueError: the policy of layer 1 must be a CachePolicy, not a "
        "Hybrid",
        "a name for a layout": "ValueError: layout of a CachePolicy is 'static': give an "
        "object, such as Dense(max_len=None, grows_to=None)",
        "a name for a codec": "ValueError: keys of a CachePolicy is 'bfloat16': give an "
        "object, such as Raw(dtype=None, as_bits=False)",
        "no policy": "ValueError: a policy, its name or a list of policies is needed, not a "
        "NoneType; make a layout into a policy with CachePolicy(layout)",
        "a window in parts": "ValueError: window must be an integer >= 1, got 2.5",
        "other rows": "ValueError: queries [batch, heads, new, head_dim] [3, 4, 1, 16] do not "
        "fit keys with batch=2, kv_heads=2, head_dim=16",
        "no queries": "ValueError: queries [batch, heads, new, head_dim] [2, 4, 0, 16] do not "
        "fit keys with batch=2, kv_heads=2, head_dim=16",
        "three axes": "ValueError: queries [batch, heads, new, head_dim] [4, 1, 16] do not fit "
        "keys with batch=2, kv_heads=2, head_dim=16",
        "lists": "ValueError: keys must be an array, got a list",
        "layer 1.0": "ValueError: layer must be an integer >= 0, got 1.0",
        "last_only traced": "ValueError: last_only must be static: use jax.jit(..., "
        'static_argnames="last_only")',
        "a fixed policy that is too small": "ValueError: prompt and max_new_tokens need 11 "
        "positions, but the policy's cache holds 10",
        "a fixed policy is fine": "accepted",
        "used up by grow": "ValueError: the cache was used up by an earlier call: use the cache "
        "which that call returned, or pass it kvjax.fork(cache)",
        "used twice": "ValueError: the cache was used up by an earlier call: use the cache which "
        "that call returned, or pass it kvjax.fork(cache)",
        "traced": "ValueError: lengths of row(s) 1 was negative or above the tokens of its call",
    }
