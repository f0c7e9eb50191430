"""Many processes as one, on the loopback address: the command line as users start it."""

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

import kvjax
from kvjax import cli
from tests.checkpoints import write_llama

PROMPT = "Once upon a time"
DEVICES = 4
"""Of a process."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Processes:
    """Some processes of ``kvjax generate --distributed``, or of a script, ended with the test."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen] = []

    def __call__(
        self, *arguments: str, process_id: int, count: int, port: int, script: str | None = None
    ) -> Any:
        flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
        flags.append(f"--xla_force_host_platform_device_count={DEVICES}")
        command = [
            "-m", "kvjax", "generate", PROMPT, "--distributed",
            "--coordinator", f"127.0.0.1:{port}", "--processes", str(count),
            "--process-id", str(process_id),
        ]  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, *(command if script is None else ["-c", script]), *arguments],
            env=os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._all.append(process)
        return process

    def stop(self) -> None:
        for process in self._all:
            process.kill()
            process.communicate()


@pytest.fixture
def start():
    processes = Processes()
    yield processes
    processes.stop()


@pytest.mark.rare
@pytest.mark.parametrize(
    ("mesh", "cache"),
    [
        # A raw cache on this mesh is the script's below, too.
        ("data=2,tensor=2,sequence=2", ["--json"]),
        ("tensor=2,sequence=4", ["--kv-bits", "8"]),
    ],
)
def test_two_processes_give_the_tokens_of_one(start, tiny_llama, tiny_llama_dir, mesh, cache):
    port = free_port()
    arguments = [
        "--model", str(tiny_llama_dir), "--dtype", "float32", "--max-new-tokens", "90",
        "--mesh", mesh, *cache,
    ]  # fmt: skip
    both = [start(*arguments, process_id=n, count=2, port=port) for n in (0, 1)]
    outputs = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    policy = kvjax.policy("static") if "--json" in cache else kvjax.policy("static", bits=8)
    wanted = kvjax.generate(tiny_llama, PROMPT, cache=policy, max_new_tokens=90)
    # The first prints, and the other does not.
    if "--json" in cache:
        assert json.loads(outputs[0][0])["tokens"] == wanted.tokens[0]
    else:
        assert outputs[0][0].decode() == wanted.text[0] + "\n"
    assert outputs[1][0] == b""


_SCRIPT = """
import sys, jax, numpy as np
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), heartbeat_timeout_seconds=20)
import kvjax
from kvjax import models

texts = ["Once upon a time", "Hi"]
alone = models.load(sys.argv[3], dtype="float32", mesh=None)
wanted = kvjax.generate(alone, texts, max_new_tokens=8).tokens
mesh = kvjax.make_mesh(data=2, tensor=2, sequence=2)
lm = alone.on(mesh)
assert kvjax.generate(alone, texts, max_new_tokens=8, mesh=mesh).tokens == wanted
found = kvjax.generate_batches(lm, [texts] * 5, max_new_tokens=8)
assert [result.tokens for result in found] == [wanted] * 5

# A loop of one's own, on a cache that moves.
cache = jax.jit(
    lambda: kvjax.init_cache(lm.config, "static", batch=2, max_len=64, mesh=mesh)
)()
tokens, lengths = lm.encode(texts)
logits, cache = lm.apply(lm.params, tokens, cache, lengths=lengths, last_only=True)
step = jax.jit(lm.apply, static_argnames="last_only", donate_argnums=2)
drawn = []
other = alone.on(kvjax.make_mesh(tensor=4, sequence=2))
for number in range(8):
    token = np.argmax(jax.experimental.multihost_utils.process_allgather(logits, tiled=True), -1)
    drawn.append(token)
    if number == 3:
        cache = kvjax.migrate(cache, kvjax.Host())
    if number == 5:
        cache, lm = kvjax.migrate(kvjax.convert(cache, "static"), mesh=other.mesh), other
    logits, cache = step(lm.params, token, cache)
assert np.concatenate(drawn, 1).tolist() == wanted
for call, words in (
    (lambda: kvjax.migrate(cache, mesh=None), "mesh=None is a single device"),
    (lambda: kvjax.init_cache(lm.config, max_len=8, mesh=kvjax.make_mesh(
        devices=[d for d in jax.devices() if d.process_index != jax.process_index()]
    )), "none of process"),
):
    try:
        call()
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
print("as one device")
"""


@pytest.mark.rare
def test_a_script_in_two_processes(start, tiny_llama_dir):
    port = free_port()
    both = [
        start(
            f"127.0.0.1:{port}", str(n), str(tiny_llama_dir),
            process_id=n, count=2, port=port, script=_SCRIPT,
        )
        for n in (0, 1)
    ]  # fmt: skip
    for process in both:
        out, error = process.communicate(timeout=240)
        assert process.returncode == 0, error.decode()
        assert "as one device" in out.decode()


@pytest.mark.slow
def test_a_mesh_that_leaves_a_process_out_is_refused(start):
    port = free_port()
    for process in [start("--mesh", "tensor=2", process_id=n, count=2, port=port) for n in (0, 1)]:
        error = process.communicate(timeout=60)[1].decode()
        assert process.returncode == 2
        assert "in 1 of 2 processes: every process must have a device of the mesh" in error
        assert "Traceback" not in error


# All that they were told is compared in one piece, whatever differs in it.
@pytest.mark.rare
@pytest.mark.parametrize(
    "told",
    [
        ("--kv-bits", "8"),
        pytest.param(("--max-new-tokens", "3"), marks=pytest.mark.rare),
        pytest.param(("--mesh", "tensor=4,data=2"), marks=pytest.mark.rare),
    ],
    ids=" ".join,
)
def test_processes_that_were_told_different_things_end(start, told):
    port = free_port()
    usual = ["--max-new-tokens", "5", "--mesh", "data=2,tensor=4"]
    for process in [
        start(*usual, process_id=0, count=2, port=port),
        start(*usual, *told, process_id=1, count=2, port=port),
    ]:
        error = process.communicate(timeout=60)[1].decode()
        assert process.returncode == 2
        assert "process 1 has another prompt, mesh or setting than process 0" in error


@pytest.fixture(scope="module")
def endless_llama_dir(tmp_path_factory):
    """A small model with so many positions that it is at work until it is stopped."""
    folder = tmp_path_factory.mktemp("checkpoints") / "endless"
    return write_llama(folder, max_position_embeddings=10**6, eos_token_id=10**6)


@pytest.mark.rare
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.rare)])
def test_a_killed_process_ends_the_others(start, endless_llama_dir, killed):
    port = free_port()
    both = [
        start(
            "--model", str(endless_llama_dir), "--max-new-tokens", "200000",
            "--mesh", "data=2,tensor=4", "--heartbeat-timeout", "10",
            process_id=n, count=2, port=port,
        )
        for n in (0, 1)
    ]  # fmt: skip
    assert both[0].stdout.read(20), both[0].communicate()  # text comes: they are at work
    both[killed].send_signal(signal.SIGKILL)
    other = both[1 - killed]
    error = other.communicate(timeout=30)[1].decode()  # which raises if it takes longer
    assert other.returncode not in (0, None)
    # In JAX's words where its own watch was first.
    assert "another process of this run has ended" in error or "another task died" in error


@pytest.mark.rare
def test_a_wrong_number_of_processes_is_an_error(start):
    port = free_port()
    few = ["--start-timeout", "8"]
    both = [start(*few, process_id=n, count=3, port=port) for n in (0, 1)]
    for process in both:
        error = process.communicate(timeout=60)[1].decode()
        assert process.returncode == 2
        assert "the 3 processes did not start within 8 seconds" in error
    port = free_port()
    told = [
        start(*few, "--heartbeat-timeout", "5", process_id=n, count=count, port=port)
        for n, count in ((0, 2), (1, 3))
    ]
    error = told[1].communicate(timeout=60)[1].decode()
    assert told[1].returncode == 2
    assert "--processes is 3, but process 0 has 2" in error
    told[0].communicate(timeout=60)
    assert told[0].returncode not in (0, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--process-id", "2"), "--process-id is 2, but must be less than 2"),
        (("--coordinator", "here"), "--coordinator is 'here': give host and port"),
        (("--coordinator", "1234"), "--coordinator is '1234': give host and port"),
        (("--coordinator", "here:99999"), "--coordinator is 'here:99999': give host and port"),
        (("--start-timeout", "0"), "--start-timeout must be an integer >= 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(monkeypatch, capfd, arguments, message):
    """Before a process joins the others, so in this one."""
    usual = ["--coordinator", "127.0.0.1:1", "--processes", "2", "--process-id", "0"]
    command = ["kvjax", "generate", PROMPT, "--distributed", *usual, *arguments]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    error = capfd.readouterr().err
    assert leaving.value.code == 2
    assert message in error
    assert "Traceback" not in error
