from __future__ import annotations

import io

from rich.console import Console

from deploy.cluster import Progress
from pdserve.progress import ProgressView


def shown(*steps: Progress, quiet: bool = False, terminal: bool = False) -> str:
    stream = io.StringIO()
    with ProgressView(Console(file=stream, width=80, force_terminal=terminal), quiet) as view:
        for step in steps:
            view(step)
    return stream.getvalue()


STEPS = (
    Progress("starting Ray", {"prefill-0": "", "decode-0": ""}),
    Progress("placing workers", {"prefill-0": "loading weights 41 %", "decode-0": "starting"}),
    Progress("placing workers", {"prefill-0": "loading weights 44 %", "decode-0": "starting"}),
    Progress("placing workers", {"prefill-0": "loading weights 52 %", "decode-0": "ready"}),
)


def test_in_a_pipe_each_change_is_one_plain_line_and_percentages_come_in_tens() -> None:
    assert shown(*STEPS).splitlines() == [
        "starting Ray ...",
        "placing workers ...",
        "prefill-0: loading weights 41 %",
        "decode-0: starting",
        "prefill-0: loading weights 52 %",
        "decode-0: ready",
    ]


def test_on_a_terminal_there_is_one_live_table_that_goes_when_the_start_is_over() -> None:
    text = shown(*STEPS, terminal=True)
    assert "prefill-0" in text
    assert "\x1b[" in text


def test_for_machines_nothing_is_shown() -> None:
    assert shown(*STEPS, quiet=True) == ""
