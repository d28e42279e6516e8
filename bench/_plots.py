"""Pictures of benchmarks, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.errors import InvalidRequest


def check(file: Path) -> None:
    """Before the work is done. Raises InvalidRequest (field "plot") when matplotlib is not there, or the file cannot be
    written."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise InvalidRequest("plots need matplotlib (pip install 'pdserve[dev]')", field="plot") from exc
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as exc:
        raise InvalidRequest(f"the plot cannot be written to {file}: {exc.strerror}", field="plot") from exc


@contextmanager
def picture(file: Path, rows: int, columns: int, *, size: tuple[float, float]) -> Iterator[Any]:
    """The axes (an array of rows and columns) of a figure that is written to `file` as PNG when the block ends well.
    Raises what check() does."""
    check(file)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    try:
        yield axes
        figure.tight_layout()
        figure.savefig(file, dpi=100, format="png")
    finally:
        pyplot.close(figure)
