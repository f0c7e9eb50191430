"""What the tests cost (``KVJAX_COUNT=1``): compiled programs and seconds, a line a file."""

import collections
import time

import jax
import pytest

COMPILED = "/jax/core/compile/backend_compile_duration"


class Counts:
    """A plugin of pytest; with pytest-xdist each worker's lines are lost, so count in one
    process."""

    def __init__(self) -> None:
        self.file = ""
        self.tests: collections.Counter[str] = collections.Counter()
        self.programs: collections.Counter[str] = collections.Counter()
        self.compiling: collections.Counter[str] = collections.Counter()
        self.seconds: collections.Counter[str] = collections.Counter()
        jax.monitoring.register_event_duration_secs_listener(self.record)

    def record(self, event: str, seconds: float, **_: object) -> None:
        """Count a program."""
        if event == COMPILED:
            self.programs[self.file] += 1
            self.compiling[self.file] += int(1e6 * seconds)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        """Measure a test, its fixtures too."""
        self.file, before = item.nodeid.split("::")[0], time.process_time()
        found = yield
        self.tests[self.file] += 1
        self.seconds[self.file] += int(1e6 * (time.process_time() - before))
        return found

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was counted, the dearest file first."""
        terminalreporter.write_sep("=", "tests, programs, seconds compiling, seconds of the CPU")
        for file, cost in self.seconds.most_common():
            compiling = self.compiling[file] / 1e6
            terminalreporter.write_line(
                f"{self.tests[file]:5} {self.programs[file]:6} {compiling:7.1f} "
                f"{cost / 1e6:7.1f}  {file}"
            )
