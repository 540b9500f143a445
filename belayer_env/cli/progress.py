"""Progress a person can watch: a spinner with the seconds on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

__all__ = ["Progress"]

# Where there is no terminal, a command's own lines are shown this often: enough to see that it lives.
HEARTBEAT_S = 5.0


class Progress:
    """Steps of a longer job. ``clock`` gives seconds."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(highlight=False)
        self._clock = clock

    def done(self, what: str, result: str, seconds: float | None = None) -> None:
        """One finished step: a line."""
        took = f" [dim]({seconds:.1f} s)[/dim]" if seconds is not None and seconds >= 0.1 else ""
        self._console.print(f"[green]✓[/green] {escape(what)}: {escape(result)}{took}", soft_wrap=True)

    @contextmanager
    def step(self, what: str) -> Iterator[Step]:
        """A step under way; its last word is `Step.result`. An error in it is shown as such and goes on."""
        step = Step(what, self._console, self._clock)
        if self._console.is_terminal:
            with self._console.status(escape(what)) as status:
                step.show = lambda detail: status.update(f"{escape(what)} [dim]{escape(detail[:100])}[/dim]")
                yield step
        else:
            self._console.print(f"  {escape(what)} ...", soft_wrap=True)
            yield step
        self.done(what, step.result, self._clock() - step.began)


class Step:
    """One step: `report` a phase of it, or pass `line` the output of a command; ``result`` ends it."""

    def __init__(self, what: str, console: Console, clock: Callable[[], float]) -> None:
        self.what = what
        self.result = "done"
        self.began = clock()
        self.show: Callable[[str], None] | None = None
        self._console = console
        self._clock = clock
        self._shown = self.began

    def report(self, phase: str) -> None:
        """What is being done now; always shown."""
        if self.show is not None:
            self.show(f"{self._clock() - self.began:.0f} s: {phase}")
        else:
            self._console.print(f"    {escape(phase)}", soft_wrap=True)
            self._shown = self._clock()

    def line(self, text: str) -> None:
        """A line of a command's output; shown on a terminal, elsewhere now and then."""
        if text and (self.show is not None or self._clock() - self._shown >= HEARTBEAT_S):
            self.report(text)
