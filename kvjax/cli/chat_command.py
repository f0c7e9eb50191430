"""``kvjax chat``: a conversation in the terminal, or line by line from a file."""

import contextlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.chats.answer import Answer
from kvjax.chats.chat import Chat, ChatStats
from kvjax.chats.rendering import PLAIN, Turn
from kvjax.cli import options
from kvjax.cli.common import mesh_from_option, raise_interrupts, read_text, use_compilation_cache
from kvjax.cli.options import cache_policy
from kvjax.cli.output import (
    bytes_by_place,
    context_warning,
    first_pieces,
    format_table,
    show_progress,
)
from kvjax.core.array_folder import expand_user
from kvjax.core.compat import RESOURCE_EXHAUSTED, jax_0_10_error_code
from kvjax.core.validation import KvjaxError
from kvjax.policies.presets import parse_policy

COMMANDS = {
    "help": ("", "show this list"),
    "show": ("", "show the turns, with their numbers"),
    "edit": ("[N] TEXT", "replace the message of turn N (by default the last) and continue there"),
    "retry": ("", "answer the last message again, with another seed"),
    "undo": ("", "remove the last turn"),
    "system": ("[TEXT]", "show the system prompt, or replace it; - removes it"),
    "save": ("FOLDER", "save the chat and its cache"),
    "load": ("FOLDER", "continue a saved chat instead of this one"),
    "stats": ("", "show tokens read, cached and generated, seconds, and bytes"),
    "exit": ("", "leave the chat, like Ctrl-D"),
}
"""For each command, its arguments and its description."""
HELP = "\n".join(
    [
        *(f"/{f'{name} {takes}':<17}{what}" for name, (takes, what) in COMMANDS.items()),
        "//TEXT            send a message that starts with a slash",
    ]
)


def chat(
    *,
    model: options.ModelOptions,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="A file with a chat template (Jinja), or plain for none; by default the "
            "checkpoint's template."
        ),
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Continue the chat in this folder, which /save wrote.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer, at most; by default 512.")
    ] = None,
    sampling: options.SamplingOptions,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    stop: options.Stop = None,
    max_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the chat, at most; by default the length that the model was trained "
            "for, up to 4096."
        ),
    ] = None,
    on_full: Annotated[
        str | None,
        typer.Option(help="When the chat is full: stop (the default), or drop the oldest turns."),
    ] = None,
    cache: options.Cache = "static",
    quantization: options.Quantization,
    sliding_window: options.SlidingWindow,
    offloading: options.Offloading,
    mesh: options.Mesh = "auto",
    drafting: options.Drafting,
) -> None:
    """Chat with a model; /help lists the commands of a chat."""
    policy = cache_policy(cache, quantization, sliding_window, offloading)
    if load is not None and policy != parse_policy("static"):
        raise ValueError("--load uses the policy of the saved chat: omit --cache")
    if template not in (None, PLAIN):
        template = read_text(expand_user(template))
    settings: dict[str, Any] = {
        "system": system,
        "template": template,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "stop": stop or None,
        "max_len": max_len,
        "on_full": on_full,
    }
    # A saved chat keeps its settings, except those that are given.
    settings = {name: value for name, value in settings.items() if value is not None} | sampling
    drafting.check()
    use_compilation_cache()
    import kvjax

    with show_progress("loading"):
        devices = mesh_from_option(mesh)
        lm = model.load(devices)
        if drafting.given:
            settings["draft"] = drafting.load(lm, devices, model.dtype)
        if load is None:
            chat = kvjax.Chat(lm, cache=policy, **settings)
        else:
            chat = kvjax.Chat.load(lm, load, **settings)
    loop = ChatLoop(chat, interactive=sys.stdin.isatty())
    with raise_interrupts():
        loop.run()
    if loop.failed and not loop.interactive:
        raise typer.Exit(2)


_HOW_TO_LEAVE = "(Ctrl-D or /exit leaves the chat; /save FOLDER saves it)"


class ChatLoop:
    """Reads lines from standard input into a chat.

    ``interactive`` says whether a user types the lines. Otherwise they come from a file or a pipe,
    and an interrupt ends the loop. ``failed`` says whether a line caused an error.
    """

    def __init__(self, chat: Chat, *, interactive: bool) -> None:
        self.chat, self.interactive, self.failed = chat, interactive, False
        self._warned = False

    def run(self) -> None:
        """Run until the input ends, or a line is ``/exit``."""
        self._greet()
        for line in self._lines():
            try:
                if not self._handle(line):
                    return
            except BrokenPipeError:  # standard output is closed
                raise
            except (KvjaxError, ValueError, OSError) as error:
                self._report(error)
            except Exception as error:  # a bug must not lose the user's chat
                if not self.interactive:
                    raise
                out_of_memory = jax_0_10_error_code(error) == RESOURCE_EXHAUSTED
                self._report(error) if out_of_memory else traceback.print_exc()
            except KeyboardInterrupt:
                self.chat.close()
                if not self.interactive:
                    raise
                _note(_HOW_TO_LEAVE)

    def _greet(self) -> None:
        if self.chat.plain:
            _note("kvjax: the model has no chat template: it continues your text")
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # enables line editing and history
            _note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves the chat")
            if self.chat.turns:
                _note(f"({_count(len(self.chat.turns), 'turn')} so far: /show)")

    def _lines(self) -> Iterator[str]:
        """Yield the lines that are not empty, without their line ends."""
        while True:
            try:
                line = input("> ") if self.interactive else input()
            except EOFError:
                if self.interactive:
                    typer.echo()
                return
            except UnicodeDecodeError as error:
                self._report(ValueError(f"the line is not UTF-8 (byte {error.start})"))
                continue
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                typer.echo()
                _note(_HOW_TO_LEAVE)
                continue
            if line.strip():
                yield line.removesuffix("\r")

    def _handle(self, line: str) -> bool:
        """Answer a message or run a command. Returns whether the loop continues."""
        name, argument = parse_line(line)
        chat = self.chat
        if name is None:
            self._answer(chat.send(argument))
        elif name == "exit":
            return False
        elif name == "help":
            typer.echo(HELP)
        elif name == "show":
            typer.echo(format_turns(chat.turns, chat.system))
        elif name == "stats":
            typer.echo(format_stats(chat.stats))
        elif name == "retry":
            self._answer(chat.retry())
        elif name == "undo":
            _note(f"(removed: {chat.undo().user})")
        elif name == "edit":
            self._answer(chat.edit(*_parse_edit(argument, len(chat.turns))))
        elif name == "system":
            self._system(argument)
        elif name == "save":
            with show_progress("saving"):
                chat.save(_folder(name, argument))
            _note(f"(saved in {argument})")
        else:
            assert name == "load" and name in COMMANDS
            # A draft model is not saved with a chat, and does not change the text.
            draft = chat.settings.get("draft")
            settings = {} if draft is None else {"draft": draft}
            with show_progress("loading"):
                self.chat = type(chat).load(chat.lm, _folder(name, argument), **settings)
            _note(f"({_count(len(self.chat.turns), 'turn')} from {argument})")
        return True

    def _answer(self, answer: Answer) -> None:
        """Print an answer while it is generated. An interrupt stops the answer, and the chat keeps
        the part that was printed."""
        printed = 0
        try:
            first_pieces(answer, "reading the prompt")
            while True:
                typer.echo(answer.text[printed:], nl=False)
                printed = len(answer.text)
                if next(answer, None) is None:
                    break
        except KeyboardInterrupt:
            answer.close()
            typer.echo(answer.text[printed:])
            if not self.interactive:
                raise
            _note("(stopped)")
            return
        except BaseException:
            typer.echo()
            raise
        typer.echo()
        stats = answer.result.stats
        if stats.finish_reasons[0] == "length":
            _note("(cut off by --max-new-tokens, or because the chat is full)")
        if stats.beyond_context and not self._warned:
            self._warned = True
            _note(context_warning(stats.beyond_context))

    def _system(self, text: str) -> None:
        if text:
            self.chat.system = None if text == "-" else text
        typer.echo(self.chat.system or "(no system prompt)")

    def _report(self, error: Exception) -> None:
        self.failed = True
        _note("kvjax: error: " + " ".join(str(error).split()))


def parse_line(line: str) -> tuple[str | None, str]:
    """Return the name of a command and its argument. For a message, return None and the message.

    Raises:
      ValueError: for an unknown command, or an argument that the command does not take.
    """
    if line.startswith("//") or not line.startswith("/"):
        return None, line.removeprefix("/")
    name, _, argument = line[1:].partition(" ")
    name, argument = name.strip(), argument.strip()
    if name not in COMMANDS:
        known = ", ".join(f"/{command}" for command in COMMANDS)
        raise ValueError(f"no command /{name}: use {known}; //{name} sends it as a message")
    if argument and not COMMANDS[name][0]:
        raise ValueError(f"/{name} takes no argument")
    return name, argument


def format_turns(turns: Sequence[Turn], system: str | None) -> str:
    """Format the turns with their numbers. Turns that the model no longer sees are marked as
    dropped."""
    lines = [] if system is None else [f"system: {system}"]
    first = turns[-1].first if turns else 0
    for index, turn in enumerate(turns):
        dropped = " (dropped)" if index < first else ""
        lines += [f"{index + 1}{dropped} > {turn.user}", turn.answer]
    return "\n".join(lines) or "(no turns yet)"


def format_stats(stats: ChatStats) -> str:
    """Format the statistics of a chat, one per line."""
    fields = asdict(stats)
    report = {name: round(x, 2) if isinstance(x, float) else x for name, x in fields.items()}
    report["remaining_tokens"] = (
        "no limit" if stats.remaining_tokens is None else stats.remaining_tokens
    )
    report["cache_bytes"] = bytes_by_place(stats.cache_bytes) or "none"
    return format_table(report)


def _parse_edit(argument: str, turns: int) -> tuple[int, str]:
    """Parse the argument of ``/edit``: the index of the turn to edit, and its new message."""
    number, _, text = argument.partition(" ")
    if not number.isdecimal():
        number, text = str(turns), argument
    if not turns or not 1 <= int(number) <= turns:
        raise ValueError(
            f"turn {number} does not exist: the chat has {turns}, numbered from 1; before a "
            "message that starts with a number, give the turn's number too"
        )
    if not text.strip():
        raise ValueError(
            "/edit takes a message, after the turn's number unless it is the last turn"
        )
    return int(number) - 1, text


def _folder(name: str, argument: str) -> str:
    if not argument:
        raise ValueError(f"/{name} takes a folder")
    return argument


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _note(line: str) -> None:
    typer.echo(line, err=True)
