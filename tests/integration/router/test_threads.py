"""What a request costs in wake-ups: on a busy core each has to wait its turn."""

from __future__ import annotations

from pathlib import Path

from bench.router import load, router, until_ready, workers

MODEL = "oracle"
POOL = "event_engine"


def switches(pid: int, name: str) -> int:
    """How often threads of this name (its beginning) have waited for something."""
    return sum(
        int(line.split()[1])
        for task in Path(f"/proc/{pid}/task").iterdir()
        if (task / "comm").read_text().startswith(name)
        for line in (task / "status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches:")
    )


def test_a_message_wakes_no_thread_of_grpcs_pool() -> None:
    """Those that it has for other things look around some hundred times a second, whatever there is to do."""
    with router(MODEL) as (pid, http, grpc), workers(grpc, MODEL, 1):
        until_ready(http, MODEL)
        before = switches(pid, POOL)

        seen = load(http, MODEL, "stream", 4, 1.0)

        assert seen["failed"] == 0
        messages = 64 * seen["requests"]  # one for every token
        assert switches(pid, POOL) - before < messages / 8 + 400 * seen["seconds"]
