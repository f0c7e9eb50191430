"""Lines through an engine, and their results into a file."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvjax.cli.batch_files import Results
from kvjax.cli.batch_lines import DuplicateError, Names, asked_for, key_of, name_of, object_of
from kvjax.cli.output import score
from kvjax.core.reporting import report_progress
from kvjax.engine.handle import Handle

TOLD = 10
"""Bad lines that are told of; others are counted."""

Lines = Iterable[tuple[int, bytes]]


@dataclass
class Counts:
    """Numbers of lines: answered, bad, with a result before (``there``), and with an error before
    (``bad_there``); tokens of the answered ones."""

    done: int = 0
    bad: int = 0
    there: int = 0
    bad_there: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0


class Batch:
    """A run over all lines.

    Args:
      engine: it has nothing else to do. ``lm``: its model.
      results: where results go.
      settings: what lines go by that do not say otherwise; each line's ``seed`` is higher by its
        number, so that it does not matter which lines were done before.
      key: of all that results depend on beside their lines.
      chat: whether a prompt goes into the chat template.
      most: requests that the engine has at once.
      say: told of bad lines.
    """

    def __init__(
        self, engine: Any, lm: Any, results: Results, settings: dict[str, Any], *, key: str,
        chat: bool, most: int, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._engine, self._lm, self._results, self._settings = engine, lm, results, settings
        self._key, self._chat, self._most, self._say = key, chat, most, say
        self._running: dict[Handle, tuple[int, str, str | int | None]] = {}
        self._ended: list[Handle] = []
        self._names = Names()
        self.counts = Counts()

    def check(self, lines: Lines) -> int:
        """How many lines there are, before any is done.

        Raises:
          ValueError: if there is a result of a line that is another one now, or is not there; if
            two lines have the same id.
        """
        number, names = 0, Names()
        for number, raw in lines:
            self._results.has(number, key_of(raw, self._key))
            try:
                names.add(number, name_of(object_of(raw)) if b'"id"' in raw else None)
            except DuplicateError as error:
                raise ValueError(f"line {number}: {error}") from None
            except ValueError:
                continue  # ``_ask`` reports it
        if number < self._results.last:
            raise self._results.foreign(self._results.last)
        return number

    def run(self, lines: Lines, total: int | None = None) -> Counts:
        """Do all lines that have no result; ``total``: how many there are, where that is known."""
        coming, seen = iter(lines), 0
        while True:
            while len(self._running) < self._most and (line := next(coming, None)) is not None:
                seen = line[0]
                self._ask(*line)
            if not self._running:
                return self.counts
            known = seen if total is None else total
            report_progress("answering lines", seen - len(self._running), known)
            self._engine.step()
            for handle in self._ended:
                self._write(handle)
            self._ended.clear()

    def _ask(self, number: int, raw: bytes) -> None:
        key = key_of(raw, self._key)
        if self._results.has(number, key):
            self.counts.there += 1
            self.counts.bad_there += self._results.bad(number)
        elif raw:
            entry: dict[str, Any] = {}
            try:
                entry = object_of(raw)
                self._names.add(number, name_of(entry))
                prompt, own = asked_for(entry, self._lm, self._chat)
                settings = self._settings | {"seed": self._settings["seed"] + number} | own
                handle = self._engine.submit(prompt, callback=self._listen, **settings)
            except ValueError as error:
                self._bad(number, key, name_of(entry), error)
            else:
                self._running[handle] = number, key, name_of(entry)

    def _listen(self, handle: Handle) -> None:
        if handle.done:
            self._ended.append(handle)

    def _write(self, handle: Handle) -> None:
        number, key, name = self._running.pop(handle)
        if handle.error is not None:
            self._bad(number, key, name, handle.error)
            return
        prompt, new = len(handle.request.tokens), len(handle.tokens)
        result: dict[str, Any] = {
            "id": name, "text": handle.text, "tokens": handle.tokens, "reason": handle.reason,
            "usage": {"prompt_tokens": prompt, "new_tokens": new},
        }  # fmt: skip
        if handle.logprobs is not None:
            result["logprobs"] = [score(each) for each in handle.logprobs]
        self._results.add(number, key, result)
        self.counts.done += 1
        self.counts.prompt_tokens += prompt
        self.counts.new_tokens += new

    def _bad(self, number: int, key: str, name: Any, error: Exception) -> None:
        words = " ".join(str(error).split())
        self._results.add(number, key, {"id": name, "error": words})
        self.counts.bad += 1
        if self.counts.bad <= TOLD:
            self._say(f"kvjax: line {number}: {words}")
        elif self.counts.bad == TOLD + 1:
            self._say("kvjax: more lines are bad; their results say why")
