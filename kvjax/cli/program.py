"""The command line: ``kvjax generate``, ``info``, ``eval``, ``plan`` and ``bench``.

Results go to standard output, everything else to standard error. What the user can mend (a file, an
option, a length) is one line and exit code 2; ``KVJAX_DEBUG=1`` shows where it was raised.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kvjax.cli.bench_command import bench
from kvjax.cli.common import (
    BitsOption,
    CacheMemoryOption,
    CacheOption,
    DtypeOption,
    GroupOption,
    KeyBitsOption,
    MeshOption,
    ModelOption,
    PrefetchOption,
    RevisionOption,
    ValueBitsOption,
    given_mesh,
    read,
    use_compilation_cache,
    utf8,
)
from kvjax.cli.eval_command import evaluate
from kvjax.cli.figures import figures, one_line, table, to_json
from kvjax.cli.plan_command import plan
from kvjax.cli.processes import (
    CoordinatorOption,
    DistributedOption,
    HeartbeatOption,
    ProcessesOption,
    ProcessIdOption,
    StartTimeoutOption,
    joined,
)
from kvjax.core.errors import KvjaxError

# Models, and with them Flax and the tokenizers, are imported in the commands: `--help` stays quick.

app = typer.Typer(
    help="The KV cache for JAX.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# Older releases of typer take their usage errors from click, newer ones from a copy of their own.
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from kvjax import __version__

        typer.echo(f"kvjax {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def generate(
    text: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file (UTF-8).")
    ] = None,
    model: ModelOption = None,
    revision: RevisionOption = None,
    dtype: DtypeOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after so many tokens.")] = 128,
    min_new_tokens: Annotated[int, typer.Option(help="No end of text before so many.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the likeliest that make up p.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Sample among those of at least p times the likeliest.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1, tokens seen before become less likely.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this string; may be repeated.")
    ] = None,
    max_len: Annotated[
        int | None, typer.Option(help="Tokens the cache can hold; by default what is needed.")
    ] = None,
    cache: CacheOption = "static",
    kv_bits: BitsOption = None,
    key_bits: KeyBitsOption = None,
    value_bits: ValueBitsOption = None,
    group_size: GroupOption = None,
    prefetch: PrefetchOption = None,
    cache_memory: CacheMemoryOption = None,
    mesh: MeshOption = "auto",
    distributed: DistributedOption = False,
    coordinator: CoordinatorOption = None,
    processes: ProcessesOption = None,
    process_id: ProcessIdOption = None,
    start_timeout: StartTimeoutOption = 60,
    heartbeat_timeout: HeartbeatOption = 20,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute everything again for every token.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end.")
    ] = False,
) -> None:
    """Continue a prompt, given as text, in a file, or on standard input."""
    words = _prompt(text, prompt, file)
    use_compilation_cache()
    import kvjax
    from kvjax import models

    settings: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        max_len=max_len,
        cache=kvjax.policy(
            cache,
            bits=kv_bits,
            key_bits=key_bits,
            value_bits=value_bits,
            group=group_size,
            prefetch=prefetch,
            memory=cache_memory,
        ),
        use_cache=not no_cache,
    )
    with joined(
        distributed, coordinator, processes, process_id, start_timeout, heartbeat_timeout,
        (words, chat, dtype, revision, mesh, as_json, settings),
    ) as speaks:  # fmt: skip
        lm = models.load(model, dtype=dtype, revision=revision, mesh=given_mesh(mesh))
        entry: Any = lm.chat([{"role": "user", "content": words}]) if chat else words
        if as_json:
            result = kvjax.generate(lm, [entry], **settings)
            found = {"text": result.text[0], "tokens": result.tokens[0]}
            if speaks:
                typer.echo(to_json(found | {"stats": figures(result.stats)}))
            return
        running = kvjax.stream(lm, [entry], **settings)
        for piece in running:
            if speaks:
                typer.echo(piece.text[0], nl=False)
        if speaks:
            typer.echo()
            typer.echo(one_line(figures(running.result.stats)), err=True)


@app.command()
def info(
    model: ModelOption = None,
    revision: RevisionOption = None,
    dtype: DtypeOption = None,
    cache: CacheOption = "static",
    kv_bits: BitsOption = None,
    key_bits: KeyBitsOption = None,
    value_bits: ValueBitsOption = None,
    group_size: GroupOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a model, the bytes its cache takes a token, and the devices."""
    import jax

    import kvjax
    from kvjax import models
    from kvjax.memory.sizes import bytes_a_token

    lm = models.load(model, dtype=dtype, revision=revision)
    config, leaves = lm.config, jax.tree.leaves(lm.params)
    policy = kvjax.policy(
        cache, bits=kv_bits, key_bits=key_bits, value_bits=value_bits, group=group_size
    )
    cache_bytes = bytes_a_token(config, policy)
    report = {
        "model": model or "the embedded model",
        "type": config.model_type,
        "parameters": sum(leaf.size for leaf in leaves),
        "parameter_bytes": sum(leaf.nbytes for leaf in leaves),
        "dtype": config.dtype,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "cache": cache,
        "cache_bytes_a_token": cache_bytes,
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()],
        "versions": {"kvjax": kvjax.__version__, "jax": jax.__version__},
    }
    typer.echo(to_json(report) if as_json else table(report))


app.command(name="eval")(evaluate)
app.command()(plan)
app.command()(bench)


def main() -> None:
    """Run the command line and leave the process with its exit code.

    Raises:
      SystemExit: 0 when all went well, 2 after an error that the user can mend (one line on
        standard error), 130 when interrupted. Errors of kvjax itself keep their traceback.
    """
    try:
        code = app(standalone_mode=False)
    except _UsageError as error:
        _leave(error, error.format_message())
    except (KvjaxError, ValueError, OSError) as error:
        _leave(error, str(error))
    except RuntimeError as error:  # JAX has no class of its own for a device without memory left
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _leave(error, str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(error: Exception, message: str) -> NoReturn:
    if os.environ.get("KVJAX_DEBUG"):
        raise error
    typer.echo("kvjax: error: " + " ".join(message.split()), err=True)
    sys.exit(2)


def _prompt(text: str | None, prompt: str | None, file: Path | None) -> str:
    given = [value for value in (text, prompt, file) if value is not None]
    if len(given) > 1:
        raise ValueError("give the prompt once: as an argument, by --prompt, or by --file")
    if file is not None:
        return _stripped(read(file))
    if not given and sys.stdin.isatty():
        raise ValueError("no prompt: give a text, --file, or - to read standard input")
    elif not given or given == ["-"]:
        return _stripped(utf8("standard input", sys.stdin.buffer.read()))
    return str(given[0])


def _stripped(words: str) -> str:
    return words.removesuffix("\n").removesuffix("\r")
