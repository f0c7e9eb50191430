"""Saved caches: identical when loaded, portable between devices, and replaced atomically."""

import dataclasses
import functools
import json
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from kvjax import models
from kvjax.codecs import Raw
from kvjax.core import array_folder
from kvjax.core.target import Target, tracing_for
from kvjax.core.validation import CacheOverflowError, CheckpointError
from kvjax.layouts import UNLIMITED, Dense, Growing, Ring
from kvjax.operations.saving import fingerprint
from tests.matrix import CODECS, tiny_config
from tests.test_prefixes import POLICIES, small

INT8 = CODECS["int8"]
CELLS = {
    "static": kvjax.CachePolicy(),
    "dynamic": kvjax.CachePolicy(Growing(16)),
    "4 and 2 bits": kvjax.CachePolicy(Dense(), CODECS["int4"], CODECS["int2"], block=8),
    "sinks of 8 bits": kvjax.CachePolicy(Ring(20, sinks=4, slack=23), INT8, INT8, block=8),
    "bits of 16": kvjax.CachePolicy(Dense(), Raw("bfloat16"), Raw("float16")),
    "host": kvjax.CachePolicy(Growing(16), placement=kvjax.Host(), block=8),
    "hybrid": kvjax.policy("hybrid", slack=15),
    **{f"pages, {name}": POLICIES[name] for name in ("raw", "int8", "sinks", "hybrid")},
}
TEXTS = np.random.default_rng(0).integers(0, 61, (3, 40))


@functools.partial(jax.jit, static_argnums=0)
def fed(apply, params, tokens, cache, lengths):
    return apply(params, tokens, cache, lengths=lengths)


def filled(policy, max_len=64, mesh=None, lengths=((16, 16, 9), (15, 2, 16))):
    """A cache of three rows of different lengths."""
    lm = small() if mesh is None else small().on(mesh)
    cache = kvjax.init_cache(lm.config, policy, batch=3, max_len=max_len, mesh=mesh)
    at = np.zeros(3, np.int64)
    for count in map(np.array, lengths):
        if cache.grows_to and at.max() + 16 > cache.max_len:
            cache = kvjax.grow(cache, 2 * cache.max_len)
        tokens = np.stack([TEXTS[row, at[row] : at[row] + 16] for row in range(3)])
        _, cache = fed(lm.architecture.apply, lm.params, tokens, cache, count.astype(np.int32))
        at += count
    return cache


def goes_on(cache, mesh=None):
    """The logits of four more tokens."""
    lm = small() if mesh is None else small().on(mesh)
    lengths = np.full(3, 4, np.int32)
    return np.asarray(fed(lm.architecture.apply, lm.params, TEXTS[:, -4:], cache, lengths)[0])


def mesh_of(data, tensor, sequence, first=0):
    devices = jax.devices()[first : first + data * tensor * sequence]
    return kvjax.make_mesh(data=data, tensor=tensor, sequence=sequence, devices=devices)


def numbers(cache):
    """Keys and values at every position of every row, per layer."""
    found = []
    for layer in range(2):
        keys, values, positions = map(np.asarray, kvjax.read(cache, layer))
        for row in range(3):
            order = np.argsort(positions[row])[np.sum(positions[row] < 0) :]
            found += [x[row][:, order].astype(np.float32) for x in (keys, values)]
    return found


RARE = (
    "pages, raw",
    "pages, int8",
    "pages, hybrid",
    "pages, sinks",
    "hybrid",
    "dynamic",
    "4 and 2 bits",
    "host",
    "sinks of 8 bits",
)


@pytest.mark.slow(but=("bits of 16",))
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.rare] * (name in RARE)) for name in CELLS]
)
def test_a_cache_comes_back_bit_for_bit(name, tmp_path):
    """The loaded cache gives the same logits, also with twice the capacity."""
    cache = kvjax.rewind(filled(CELLS[name]), np.array([2, 0, 1]))
    kvjax.save_cache(tmp_path / "a", cache, model=small(), tokens=TEXTS.tolist())
    found, tokens = kvjax.load_cache(tmp_path / "a", model=small())
    assert tokens == TEXTS.tolist() and found.length.tolist() == cache.length.tolist()
    assert [x.policy for x in found.layers] == [x.policy for x in cache.layers]
    wanted = goes_on(cache)
    assert np.array_equal(goes_on(found), wanted)
    if cache.max_len < UNLIMITED:
        twice, _ = kvjax.load_cache(tmp_path / "a", max_len=128)
        assert 128 in (twice.max_len, twice.grows_to)
        np.testing.assert_allclose(goes_on(twice), wanted, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match=r"max_len is 48, but the cache in .*a holds 64"):
            kvjax.load_cache(tmp_path / "a", max_len=48)


def size_of(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.slow(but=("static",))
@pytest.mark.parametrize("policy", ["static", kvjax.policy(bits=8), kvjax.policy("paged")], ids=str)
def test_what_is_empty_is_not_written(policy, tmp_path):
    """A short sequence in a large cache makes a small file; saving again deletes the old arrays."""
    config = tiny_config(num_hidden_layers=1, windows=(None,))
    keys = np.random.default_rng(0).normal(size=(1, 2, 200, 8)).astype(np.float32)
    cache = kvjax.init_cache(config, policy, batch=1, max_len=65_536)
    cache = kvjax.advance(kvjax.append(cache, 0, keys, keys), 200)
    for _ in range(2):
        kvjax.save_cache(tmp_path, cache)
        assert size_of(tmp_path) < 100_000
    found, _ = kvjax.load_cache(tmp_path)
    assert found.max_len == 65_536
    for one, other in zip(kvjax.read(found, 0), kvjax.read(cache, 0), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("static", (3, 1, 2)),
        *(
            pytest.param(*cell, marks=pytest.mark.rare)
            for cell in (
                ("pages, int8", (1, 2, 1)), ("4 and 2 bits", (1, 2, 1)), ("static", (1, 2, 1)),
                ("pages, int8", (3, 1, 1)),
                ("4 and 2 bits", (3, 1, 2)),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_from_a_mesh_and_to_one(name, axes, tmp_path):
    mesh = mesh_of(*axes)
    cache = filled(CELLS[name], mesh=mesh)
    kvjax.save_cache(tmp_path / "a", cache, model=small())
    alone, _ = kvjax.load_cache(tmp_path / "a", model=small())
    assert alone.mesh_sharding is None
    wanted = goes_on(cache, mesh)
    np.testing.assert_allclose(goes_on(alone), wanted, rtol=1e-4, atol=1e-4)
    other = mesh_of(1, 2, 1, first=4)
    moved, _ = kvjax.load_cache(tmp_path / "a", mesh=other)
    assert moved.length.devices() == {*jax.devices()[4:6]}
    np.testing.assert_allclose(goes_on(moved, other), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "bits of 16",
        *(
            pytest.param(name, marks=pytest.mark.rare)
            for name in ("pages, int8", "4 and 2 bits", "sinks of 8 bits")
        ),
    ],
)
def test_from_an_accelerators_form_and_to_it(name, tmp_path):
    """Codes are loaded unchanged, whatever their storage order on a device."""
    with tracing_for(Target("tpu")):
        cache = filled(CELLS[name])
        kvjax.save_cache(tmp_path / "tpu", cache)
        wanted = numbers(cache)
    here, _ = kvjax.load_cache(tmp_path / "tpu")
    assert {x.policy.placement.platform() for x in here.layers} == {"cpu"}
    kvjax.save_cache(tmp_path / "cpu", here)
    with tracing_for(Target("tpu")):
        back, _ = kvjax.load_cache(tmp_path / "cpu")
        assert {x.policy.placement.platform() for x in back.layers} == {"tpu"}
        again = numbers(back)
    for one, two, three in zip(wanted, numbers(here), again, strict=True):
        kept = min(one.shape[1], two.shape[1])  # a ring's slack depends on the device
        assert kept >= 18 and np.array_equal(one[:, -kept:], two[:, -kept:])
        assert np.array_equal(two, three)


@pytest.mark.rare
def test_generation_goes_on_from_a_file_in_another_process(tmp_path):
    lm = models.load()
    first = kvjax.generate(lm, ["Once upon a time"], max_new_tokens=12)
    kvjax.save_cache(tmp_path / "a", first.cache, model=lm)
    logits, cache = lm.apply(lm.params, np.array(first.pending_tokens), first.cache)
    wanted = kvjax.generate(lm, [[7, 8, 9]], cache=cache, max_new_tokens=6).tokens
    program = f"""
import kvjax
import numpy as np
from kvjax import models
lm = models.load()
cache, _ = kvjax.load_cache({str(tmp_path / "a")!r}, model=lm)
logits, cache = lm.apply(lm.params, np.array({first.pending_tokens}), cache)
print([logits.tolist(), kvjax.generate(lm, [[7, 8, 9]], cache=cache, max_new_tokens=6).tokens])
"""
    found = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert json.loads(found.stdout) == [logits.tolist(), wanted]


# Atomic replacement.


def refused(path, message, **more):
    with pytest.raises(CheckpointError, match=message):
        kvjax.load_cache(path, **more)


def checked(text, old, new):
    """The contents of ``kvjax.json`` with a replacement and a matching checksum."""
    assert old in text
    words = json.loads(text.replace(old, new))
    form, _ = words.pop("form"), words.pop("check")
    return json.dumps(words | {"form": form, "check": array_folder._json_checksum(words)})


def test_what_is_foreign_or_cut_is_refused_by_name(tmp_path):
    lm, cache = small(), filled(CELLS["static"])
    refused(tmp_path / "a", "a: has no saved data: kvjax.json is missing")
    kvjax.save_cache(tmp_path / "a", cache, model=lm)
    trained = dataclasses.replace(lm, params=jax.tree.map(lambda x: x + 1, lm.params))
    refused(tmp_path / "a", f"was saved for model {fingerprint(lm)}, but", model=trained)
    refused(tmp_path / "a", "but the model here is run 2", model="run 2")
    other = small(num_hidden_layers=1, windows=(None,))
    refused(tmp_path / "a", "a cache works only with the model", model=other)
    name = tmp_path / "a" / "kvjax.json"
    told = name.read_text()
    for text, message in (
        (told[:-100], "kvjax.json: was truncated or modified"),
        ("[]", "was truncated or modified"),
        (
            told.replace("a cache", "a tree"),
            "was truncated or modified: its checksum does not match",
        ),
        (told.replace('"form": 1', '"form": 9'), "format 9, but this version reads 1"),
        (checked(told, "a cache", "a tree"), "holds a tree, not a cache"),
        (checked(told, '"class": "Dense"', '"class": "Thin"'), "is not in this version's format"),
        (checked(told, '"max_len": 64', '"max_len": 8'), "where .* was expected"),
        (checked(told, '"tokens"', '"words"'), "is not in this version's format: 'tokens'"),
        (checked(told, '"files": {', '"files": [], "others": {'), "was truncated or modified"),
        (checked(told, '"told": {', '"told": 3, "others": {'), "was truncated or modified"),
    ):
        name.write_text(text)
        refused(tmp_path / "a", message)
    name.write_text(told)
    kvjax.load_cache(tmp_path / "a", model=lm)
    largest = max((tmp_path / "a").rglob("*"), key=lambda file: file.stat().st_size)
    data = largest.read_bytes()
    for changed, message in (
        (
            data[: len(data) // 2],
            f"{largest.name}: was truncated or modified: it has {len(data) // 2} by",
        ),
        (data[:-1] + bytes([data[-1] ^ 1]), f"{largest.name}: was modified after it was saved"),
    ):
        largest.write_bytes(changed)
        refused(tmp_path / "a", message)
    largest.unlink()
    refused(tmp_path / "a", f"{largest.name}: is missing")


def test_what_is_not_saved(tmp_path):
    cache = filled(CELLS["static"])
    (tmp_path / "arrays-2024").mkdir()
    (tmp_path / "arrays-2024" / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "arrays-2024" / "notes.txt"):
        with pytest.raises(CheckpointError, match="exists but was not saved by kvjax"):
            kvjax.save_cache(path, cache)
    with pytest.raises(
        ValueError, match=r"tokens has \[1, 1, 1\] tokens, but the rows hold \[31, 18, 25\]"
    ):
        kvjax.save_cache(tmp_path / "a", cache, tokens=[[1]] * 3)
    with pytest.raises(ValueError, match="save_cache"):
        jax.jit(lambda c: kvjax.save_cache(tmp_path / "a", c))(cache)
    spoilt = dataclasses.replace(cache, status=cache.status | 1)
    with pytest.raises(CacheOverflowError):
        kvjax.save_cache(tmp_path / "a", spoilt)
    assert not (tmp_path / "a").exists()


STEPS = ("mkdir", "save", "finished", "open", "replace", "clean")


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_that_stops_anywhere_leaves_the_old_or_the_new(step, tmp_path, monkeypatch):
    """In every call that may be interrupted."""
    import orbax.checkpoint as ocp

    class Stopped(BaseException):
        pass

    def stop(*args, **kwargs):
        raise Stopped

    old, new = ({"x": np.full(1000, n, np.float32)} for n in (1, 2))
    array_folder.save_folder(tmp_path / "a", old, {"is": "old"}).wait()
    where = {
        "mkdir": (array_folder.Path, "mkdir"), "save": (ocp.StandardCheckpointer, "save"),
        "finished": (ocp.StandardCheckpointer, "wait_until_finished"),
        "open": (array_folder.Path, "open"),
        "replace": (array_folder.Path, "replace"), "clean": (array_folder.shutil, "rmtree"),
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(*where[step], stop)
        with pytest.raises(Stopped):
            array_folder._write(tmp_path / "a", new, {"is": "new"})
    told, found = array_folder.read_folder(tmp_path / "a")
    wanted = "new" if step == "clean" else "old"
    assert told == {"is": wanted} and np.array_equal(
        found["x"], {"old": old, "new": new}[wanted]["x"]
    )
    array_folder.save_folder(tmp_path / "a", new, {"is": "new"}).wait()
    assert array_folder.read_folder(tmp_path / "a")[0] == {"is": "new"}
    assert len(list((tmp_path / "a").iterdir())) == 2  # no files of interrupted writers remain


WRITER = """
import itertools, sys
import numpy as np
from kvjax.core.array_folder import save_folder
for n in itertools.count(1):
    save_folder(sys.argv[1], {f"{k}": np.full((64, 1000), n) for k in range(8)}, {"n": n}).wait()
    print(n, flush=True)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_the_old_or_the_new(tmp_path):
    """Several writers, killed at different moments."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / str(n))],
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    for number, writer in enumerate(writers):
        written = [int(writer.stdout.readline()) for _ in range(2)][-1]
        time.sleep(0.004 * number)
        writer.kill()
        rest, _ = writer.communicate()
        last = int(rest.split()[-1]) if rest.split() else written
        told, found = array_folder.read_folder(tmp_path / str(number))
        assert told["n"] in (last, last + 1)
        assert all(np.array_equal(x, np.full((64, 1000), told["n"])) for x in found.values())


@pytest.mark.slow
def test_two_savings_of_one_folder_come_one_after_the_other(tmp_path):
    """The later save wins; among processes, the last one to finish."""
    old = {"x": np.zeros(3)}
    others = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "a")], stdout=-1, text=True)
        for _ in range(2)
    ]
    for other in others:
        other.stdout.readline()
    for n in range(6):
        one, two = (
            array_folder.save_folder(tmp_path / name, old, {"n": -n})
            for name, n in (("b", 2 * n), ("b", 2 * n + 1))
        )
        one.wait()
        two.wait()
        assert array_folder.read_folder(tmp_path / "b")[0] == {"n": -2 * n - 1}
        array_folder.save_folder(tmp_path / "a", old, {"n": -n}).wait()
        assert array_folder.read_folder(tmp_path / "a")[0].keys() == {"n"}
    for other in others:
        other.kill()
        other.communicate()
    array_folder.read_folder(tmp_path / "a")


@pytest.mark.slow
def test_a_program_that_ends_has_written_or_says_that_it_has_not(tmp_path):
    program = """
import sys
import numpy as np
from kvjax.core.array_folder import save_folder
save_folder(sys.argv[1], {"x": np.ones(300_000)}, {"n": 1})
save_folder(sys.argv[2], {"x": np.ones((0, 3))}, {"n": 1})
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "a", tmp_path / "b"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "b was not saved: " in ended.stderr
    if "a was not saved: can't create new thread" not in ended.stderr:  # from Python 3.12 on
        assert array_folder.read_folder(tmp_path / "a")[1]["x"].sum() == 300_000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "int4"])
def test_a_fingerprint_is_of_every_number(dtype):
    """On any device, and on a mesh."""
    x = jnp.arange(24 * 8).reshape(24, 8).astype(dtype)
    others = [x, x.at[11, 3].multiply(-1), x[::-1], x.at[:, 0].set(x[:, 1]).at[:, 1].set(x[:, 0])]
    told = [fingerprint(types.SimpleNamespace(config=1, params={"w": w})) for w in others]
    assert len({*told}) == 4
    spread = jax.device_put(x, NamedSharding(mesh_of(1, 2, 1), PartitionSpec("tensor")))
    assert told[0] == fingerprint(types.SimpleNamespace(config=1, params={"w": spread}))


def test_a_second_thread_writes_what_was_there(tmp_path):
    """Even if the cache changes meanwhile; ``wait`` raises the writer's errors."""
    cache = filled(CELLS["static"])
    wanted = numbers(cache)
    saving = kvjax.save_cache(tmp_path / "a", cache, wait=False)
    jax.tree.map(lambda x: x.delete(), cache)
    saving.wait()
    found, _ = kvjax.load_cache(tmp_path / "a")
    assert all(map(np.array_equal, numbers(found), wanted))
    (tmp_path / "b").mkdir()
    saving = array_folder.save_folder(tmp_path / "b", {"x": np.zeros((0, 3))}, {})
    with pytest.raises(ValueError, match="zero size"):
        saving.wait()


@pytest.mark.slow
def test_a_home_is_found(tmp_path, monkeypatch):
    """``~`` is expanded in every path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    lm = models.load()
    cache = kvjax.generate(lm, "a", max_new_tokens=2, max_len=16).cache
    kvjax.save_cache("~/cache", cache)
    assert kvjax.load_cache("~/cache")[0].length.tolist() == cache.length.tolist()
    lm.save("~/model")
    assert models.load("~/model").config == lm.config
    chat = kvjax.Chat(lm, max_len=32)
    chat.save("~/chat")
    assert kvjax.Chat.load(lm, "~/chat").turns == ()
    tree = kvjax.PrefixTree(
        lm, pages=4, max_len=32, host_memory=2**20, disk_memory=2**20, folder="~/pages"
    )
    tree.save("~/tree", lm)
    assert {x.name for x in tmp_path.iterdir()} == {"cache", "model", "chat", "pages", "tree"}
