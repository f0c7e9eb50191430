"""``kvjax batch``: generate texts for a file of prompts."""

import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.cli import options
from kvjax.cli.batch_files import (
    DuplicateIdError,
    LineIds,
    ResultsFile,
    input_key,
    line_id,
    number_lines,
    parse_line,
    parse_prompt,
)
from kvjax.cli.common import mesh_from_option, message_on_interrupt, use_compilation_cache
from kvjax.cli.options import cache_policy
from kvjax.cli.output import echo_json, score_as_json, show_progress
from kvjax.core.reporting import report_progress
from kvjax.engine.engine import Engine
from kvjax.engine.handle import Handle
from kvjax.engine.stats import EngineStats
from kvjax.generation.loaded_model import LanguageModel
from kvjax.operations.saving import fingerprint

REQUESTS_PER_ROW = 4
"""The number of unfinished requests per row of the engine. It is large enough that no row is
idle."""
DEFAULT_MAX_LEN = 4096
"""The maximum number of tokens of a sequence, unless ``--max-seq-len`` is given."""
BAD_LINES = 3
"""The exit code if a line has an error."""
MAX_REPORTED = 10
"""The maximum number of errors that are printed. Further errors are only counted."""

NumberedLines = Iterable[tuple[int, bytes]]


def batch(
    *,
    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPTS",
            help='A file of JSON objects, one per line: {"prompt": text}, {"tokens": [ids]} or '
            '{"messages": [chat]}, optionally with an id and the settings below; - reads standard '
            'input. With "continue_final_message": true the last message is continued.',
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="The file of results, one per line, in the order in which they finish; the field "
            "line is the number of the prompt's line. Lines that have a result are skipped."
        ),
    ],
    model: options.ModelOptions,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many new tokens.")] = 128,
    sampling: options.SamplingOptions,
    seed: Annotated[
        int,
        typer.Option(help="The seed of a line is this plus its number, unless the line has one."),
    ] = 0,
    stop: options.Stop = None,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Return log-probabilities of the tokens and of this many likeliest."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")
    ] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Run lines again whose result is an error.")
    ] = False,
    cache: options.Cache = "paged",
    quantization: options.Quantization,
    size: options.EngineOptions,
    mesh: options.Mesh = "auto",
    drafting: options.Drafting,
    as_json: options.Json = False,
) -> None:
    """Continue the prompts in a file. An interrupted run continues with the same command, and runs
    no line twice."""
    drafting.check()
    from_stdin = str(prompts) == "-"
    if not from_stdin and out.exists() and prompts.exists() and prompts.samefile(out):
        raise ValueError(f"{prompts} is the input, and can't be --out too")
    policy = cache_policy(cache, quantization)
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        **sampling,
        "seed": seed,
        "stop": stop or None,
        "logprobs": logprobs,
    }
    streamed = from_stdin or not prompts.is_file()  # a pipe can't be read twice
    with (
        nullcontext(sys.stdin.buffer) if from_stdin else prompts.open("rb") as file,
        closing(ResultsFile(out, retry_errors=retry_errors)) as results,
    ):
        if streamed and len(results):
            raise ValueError(
                f"{out} has {len(results)} results, and only a run over a file can be continued"
            )
        use_compilation_cache()
        with show_progress("loading"):
            lm = model.load(mesh_from_option(mesh))
            positions = lm.config.position_limit or lm.config.context or DEFAULT_MAX_LEN
            draft = drafting.load(lm, lm.mesh, model.dtype)
            engine = size.engine(lm, policy, min(positions, DEFAULT_MAX_LEN), draft=draft)
            engine.check([0], **settings)  # reports an invalid setting before the first line
            end_tokens = lm.generation.eos_token_ids
            key = json.dumps([settings, chat, repr(policy), fingerprint(lm), end_tokens])
        with show_progress("reading the lines") as print_line:
            run = BatchRun(
                engine,
                lm,
                results,
                settings,
                key=key,
                chat=chat,
                max_requests=REQUESTS_PER_ROW * size.max_batch_size,
                print_line=print_line,
            )
            total = None
            if not streamed:
                total = run.check(number_lines(file))
                file.seek(0)
            results.prepare()
            start = time.perf_counter()
            with message_on_interrupt(lambda: _interrupted(len(results) + run.finished, streamed)):
                counts = run.run(number_lines(file), total)
            seconds = time.perf_counter() - start
    report = _report(counts, engine.stats(), seconds)
    if as_json:
        echo_json(report)
    else:
        typer.echo(_summary(report, out), err=True)
    if counts.failed or counts.skipped_errors:
        raise typer.Exit(BAD_LINES)


@dataclass
class BatchCounts:
    """Counts of lines and tokens.

    Attributes:
      done: lines for which a text was generated.
      failed: lines with an error.
      skipped: lines that already had a result.
      skipped_errors: skipped lines whose result is an error.
      prompt_tokens, new_tokens: tokens of the lines in ``done``.
    """

    done: int = 0
    failed: int = 0
    skipped: int = 0
    skipped_errors: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0


class BatchRun:
    """A run over all lines of a file.

    Args:
      engine: an idle engine.
      lm: the engine's model.
      results: the file to append the results to.
      settings: settings for all lines. A line's own settings override them. The number of a line is
        added to ``seed``, so that its text does not depend on which lines ran before.
      key: a string that identifies everything on which the results depend, except the lines.
      chat: whether prompts are put into the chat template.
      max_requests: maximum number of unfinished requests in the engine.
      print_line: a function that prints an error.
    """

    def __init__(
        self,
        engine: Engine,
        lm: LanguageModel,
        results: ResultsFile,
        settings: dict[str, Any],
        *,
        key: str,
        chat: bool,
        max_requests: int,
        print_line: Callable[[str], None],
    ) -> None:
        self._engine, self._lm, self._results, self._settings = engine, lm, results, settings
        self._key, self._chat = key, chat
        self._max_requests, self._print_line = max_requests, print_line
        self._running: dict[Handle, tuple[int, str, str | int | None]] = {}
        self._ended: list[Handle] = []
        self._ids = LineIds()
        self.counts = BatchCounts()

    @property
    def finished(self) -> int:
        """The number of lines that this run has finished, with or without an error."""
        return self.counts.done + self.counts.failed

    def check(self, lines: NumberedLines) -> int:
        """Compare all lines with the existing results, and return their number.

        Raises:
          ValueError: if a result belongs to a different or a missing line, or if two lines have
            the same id.
        """
        number, ids = 0, LineIds()
        for number, raw in lines:
            self._results.has(number, input_key(raw, self._key))
            try:
                ids.add(number, line_id(parse_line(raw)) if b'"id"' in raw else None)
            except DuplicateIdError as error:
                raise ValueError(f"line {number}: {error}") from None
            except ValueError:
                continue  # ``_submit`` reports it
        if number < self._results.last_line:
            raise self._results.mismatch(self._results.last_line)
        return number

    def run(self, lines: NumberedLines, total: int | None = None) -> BatchCounts:
        """Run all lines that have no result. ``total`` is the number of lines, if it is known."""
        remaining, read = iter(lines), 0
        while True:
            while len(self._running) < self._max_requests:
                line = next(remaining, None)
                if line is None:
                    break
                read = line[0]
                self._submit(*line)
            if not self._running:
                return self.counts
            report_progress(
                "answering lines", read - len(self._running), read if total is None else total
            )
            self._engine.step()
            for handle in self._ended:
                self._write(handle)
            self._ended.clear()

    def _submit(self, number: int, raw: bytes) -> None:
        key = input_key(raw, self._key)
        if self._results.has(number, key):
            self.counts.skipped += 1
            self.counts.skipped_errors += self._results.is_error(number)
        elif raw:
            entry: dict[str, Any] = {}
            try:
                entry = parse_line(raw)
                self._ids.add(number, line_id(entry))
                prompt, own_settings = parse_prompt(entry, self._lm, self._chat)
                seed = self._settings["seed"] + number
                settings: dict[str, Any] = self._settings | {"seed": seed} | own_settings
                handle = self._engine.submit(prompt, callback=self._on_update, **settings)
            except ValueError as error:
                self._write_error(number, key, line_id(entry), error)
            else:
                self._running[handle] = number, key, line_id(entry)

    def _on_update(self, handle: Handle) -> None:
        if handle.done:
            self._ended.append(handle)

    def _write(self, handle: Handle) -> None:
        number, key, name = self._running.pop(handle)
        if handle.error is not None:
            self._write_error(number, key, name, handle.error)
            return
        prompt_tokens, new_tokens = len(handle.request.tokens), len(handle.tokens)
        result: dict[str, object] = {
            "id": name,
            "text": handle.text,
            "tokens": handle.tokens,
            "finish_reason": handle.finish_reason,
            "usage": {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens},
        }
        if handle.logprobs is not None:
            result["logprobs"] = [score_as_json(score) for score in handle.logprobs]
        self._results.append(number, key, result)
        self.counts.done += 1
        self.counts.prompt_tokens += prompt_tokens
        self.counts.new_tokens += new_tokens

    def _write_error(self, number: int, key: str, name: str | int | None, error: Exception) -> None:
        message = " ".join(str(error).split())
        self._results.append(number, key, {"id": name, "error": message})
        self.counts.failed += 1
        if self.counts.failed <= MAX_REPORTED:
            self._print_line(f"kvjax: line {number}: {message}")
        elif self.counts.failed == MAX_REPORTED + 1:
            self._print_line("kvjax: more lines have errors; see their results")


def _report(counts: BatchCounts, stats: EngineStats, seconds: float) -> dict[str, Any]:
    """Return the statistics of a run, as ``--json`` prints them."""
    return {
        "done": counts.done,
        "failed": counts.failed,
        "already_done": counts.skipped,
        "failed_before": counts.skipped_errors,
        "prompt_tokens": counts.prompt_tokens,
        "new_tokens": counts.new_tokens,
        "cached_tokens": stats.cached_tokens,
        "preemptions": stats.preemptions,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "seconds": seconds,
        "tokens_per_second": counts.new_tokens / max(seconds, 1e-9),
    }


def _summary(report: dict[str, Any], out: Path) -> str:
    """Return the last line of output of a run."""
    parts = [f"{_lines(report['done'])} done"]
    if report["already_done"]:
        errors = report["failed_before"]
        hint = f", {errors:,} of them with errors: --retry-errors" if errors else ""
        parts.append(f"{report['already_done']:,} skipped{hint}")
    parts.append(f"{report['failed']:,} failed" + (f", see {out}" if report["failed"] else ""))
    parts.append(
        f"{report['prompt_tokens']:,} prompt ({report['cached_tokens']:,} cached) + "
        f"{report['new_tokens']:,} new tokens"
    )
    if report["drafted_tokens"]:
        accepted = f"{report['accepted_tokens']:,} of {report['drafted_tokens']:,}"
        parts.append(f"{accepted} drafted tokens accepted")
    parts.append(f"{report['seconds']:.1f} s, {report['tokens_per_second']:.1f} tokens/s")
    return " · ".join(parts)


def _interrupted(done: int, streamed: bool) -> str:
    """Return the last line of output of an interrupted run."""
    how = "put the lines into a file to continue" if streamed else "the same command continues"
    return f"kvjax: stopped with {_lines(done)} done: {how}"


def _lines(count: int) -> str:
    return f"{count:,} line{'' if count == 1 else 's'}"
