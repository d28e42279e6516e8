"""What a start looks like: a live table on a terminal, plain lines elsewhere, nothing for machines."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from deploy.cluster import Progress


class ProgressView:
    """Callable with each Progress; a context manager around the start."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        self._live: Live | None = None
        self._said: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, transient=True, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, progress: Progress) -> None:
        if self._live is not None:
            self._live.update(_table(progress))
        elif not self._quiet:
            self._lines({"": progress.stage, **progress.workers})

    def _lines(self, now: dict[str, str]) -> None:
        """Only what changed, and of a percentage only each tenth."""
        for name, text in now.items():
            short = _coarse(text)
            if short and self._said.get(name) != short:
                self._said[name] = short
                self._console.print(f"{name}: {text}" if name else f"{text} ...", markup=False, highlight=False)


def _coarse(text: str) -> str:
    words = [word[:-1] + "0" if word.isdigit() and len(word) > 1 else word for word in text.split()]
    return " ".join("0" if word.isdigit() and len(word) == 1 else word for word in words)


def _table(progress: Progress) -> Table:
    table = Table(title=f"pdserve: {progress.stage}", title_justify="left", show_header=False, box=None)
    for name, text in progress.workers.items():
        style = "green" if text == "ready" else "yellow"
        table.add_row(name, text or "-", style=style)
    return table
