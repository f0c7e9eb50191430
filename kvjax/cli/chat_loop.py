"""A conversation line by line: what is asked, and commands between."""

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import asdict

import typer

from kvjax.chats.answer import Answer
from kvjax.chats.chat import Chat
from kvjax.cli.chat_words import COMMANDS, HELP, split, stats_table, turns_shown
from kvjax.cli.output import beyond
from kvjax.cli.progress import begun, shown
from kvjax.core.compat import RESOURCE_EXHAUSTED, jax_0_10_error_code
from kvjax.core.errors import KvjaxError

_LEAVE = "(Ctrl-D or /exit leaves the chat; /save FOLDER keeps it)"


class Talk:
    """A chat, and what is typed into it.

    ``alone``: nobody sits there: lines come from a file or a pipe, and an interrupt ends it all.
    ``failed``: whether a line could not be done.
    """

    def __init__(self, chat: Chat, *, alone: bool) -> None:
        self.chat, self.alone, self.failed = chat, alone, False
        self._warned = False

    def run(self) -> None:
        """Until the lines end, or one says so."""
        self._greet()
        for line in self._lines():
            try:
                if not self._done(line):
                    return
            except BrokenPipeError:  # nobody reads what is said
                raise
            except (KvjaxError, ValueError, OSError) as error:
                self._tell(error)
            except Exception as error:  # whatever it is, the chat is still there
                if self.alone:
                    raise
                memory = jax_0_10_error_code(error) == RESOURCE_EXHAUSTED
                self._tell(error) if memory else traceback.print_exc()
            except KeyboardInterrupt:
                self.chat.close()
                if self.alone:
                    raise
                _note(_LEAVE)

    def _greet(self) -> None:
        if self.chat.plain:
            _note("kvjax: there is no chat template: the model goes on with what it is told")
        if not self.alone:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # lines can be edited, and come back
            _note("/help lists commands, Ctrl-C ends an answer, Ctrl-D the chat")
            if self.chat.turns:
                _note(f"({_counted(len(self.chat.turns), 'turn')} so far: /show)")

    def _lines(self) -> Iterator[str]:
        """What is typed, or comes from a file, without what ends its lines."""
        while True:
            try:
                line = input() if self.alone else input("> ")
            except EOFError:
                if not self.alone:
                    typer.echo()
                return
            except UnicodeDecodeError as error:
                self._tell(ValueError(f"the line is not UTF-8 (byte {error.start})"))
                continue
            except KeyboardInterrupt:
                if self.alone:
                    raise
                typer.echo()
                _note(_LEAVE)
                continue
            if line.strip():
                yield line.removesuffix("\r")

    def _done(self, line: str) -> bool:
        """Whether there may be more after a line: a text, or a command."""
        name, rest = split(line)
        chat = self.chat
        if name is None:
            self._answer(chat.send(rest))
        elif name == "exit":
            return False
        elif name == "help":
            typer.echo(HELP)
        elif name == "show":
            typer.echo(turns_shown(chat.turns, chat.system))
        elif name == "stats":
            typer.echo(stats_table(asdict(chat.stats)))
        elif name == "retry":
            self._answer(chat.retry())
        elif name == "undo":
            _note(f"(taken back: {chat.undo().user})")
        elif name == "edit":
            self._answer(chat.edit(*_edited(rest, len(chat.turns))))
        elif name == "system":
            self._system(rest)
        elif name == "save":
            with shown("saving"):
                chat.save(_folder(name, rest))
            _note(f"(saved in {rest})")
        else:
            assert name == "load" and name in COMMANDS
            # A draft's model can't be saved, and changes no text: this chat's goes on.
            draft = chat.settings.get("draft")
            given = {} if draft is None else {"draft": draft}
            with shown("loading"):
                self.chat = type(chat).load(chat.lm, _folder(name, rest), **given)
            _note(f"({_counted(len(self.chat.turns), 'turn')} from {rest})")
        return True

    def _answer(self, answer: Answer) -> None:
        """Print an answer as it comes; an interrupt ends it, and it stays as far as it came."""
        printed = 0
        try:
            begun(answer, "reading the prompt")
            while True:
                typer.echo(answer.text[printed:], nl=False)
                printed = len(answer.text)
                if next(answer, None) is None:
                    break
        except KeyboardInterrupt:
            answer.close()
            typer.echo(answer.text[printed:])
            if self.alone:
                raise
            _note("(stopped)")
            return
        except BaseException:
            typer.echo()
            raise
        typer.echo()
        stats = answer.result.stats
        if stats.stop_reasons[0] == "length":
            _note("(cut off: --max-new-tokens, or the chat is full)")
        if stats.beyond_context and not self._warned:
            self._warned = True
            _note(beyond(stats.beyond_context))

    def _system(self, text: str) -> None:
        if text:
            self.chat.system = None if text == "-" else text
        typer.echo(self.chat.system or "(there is no system prompt)")

    def _tell(self, error: Exception) -> None:
        self.failed = True
        _note("kvjax: error: " + " ".join(str(error).split()))


def _edited(rest: str, turns: int) -> tuple[int, str]:
    """Which turn, and its new text."""
    number, _, text = rest.partition(" ")
    if not number.isdecimal():
        number, text = str(turns), rest
    if not turns or not 1 <= int(number) <= turns:
        raise ValueError(
            f"there is no turn {number} to edit: the chat has {turns}, 1 the first; of "
            "a text that begins with a number name its turn too"
        )
    if not text.strip():
        raise ValueError("/edit takes a number of a turn, unless it is the last, and its new text")
    return int(number) - 1, text


def _folder(name: str, rest: str) -> str:
    if not rest:
        raise ValueError(f"/{name} takes a folder")
    return rest


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _note(line: str) -> None:
    typer.echo(line, err=True)
