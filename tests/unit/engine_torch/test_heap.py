"""Memory that a step has freed is there for the next one."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, threading
import torch
from engine.heap import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    print(-1)
    raise SystemExit
def steps():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for pages in range(256, 1856, 16):  # from a mebibyte on, each a bit larger than all before
        torch.ones(pages, 1024)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""
PAGES = sum(range(256, 1856, 16))
"""Of 4 KiB, of all tensors together."""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_a_step_gets_what_steps_before_it_have_freed_and_not_new_pages() -> None:
    """Left alone, malloc learns from what was freed and still gets each of these from the kernel: it is the largest
    one so far. Kept, only what it is larger by is new, a twentieth; the bound leaves room for a heap with holes."""
    kept = faults("keep")
    if kept < 0:
        pytest.skip("malloc is not glibc's")
    assert kept < PAGES // 4
    assert faults("leave") >= PAGES
