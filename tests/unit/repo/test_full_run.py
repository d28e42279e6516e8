from __future__ import annotations

from tests.full_run import page

OUTPUT = """
....F
============ slowest durations ============
12.50s call     tests/faults/test_faults.py::test_a
FAILED tests/unit/x.py::test_b - AssertionError
=========== 1 failed, 41 passed in 60.12s ===========
""".splitlines()


def test_the_page_says_when_of_what_with_what_result_and_what_was_slow() -> None:
    text = page(OUTPUT, 1)
    assert "exit status 1" in text
    assert "commit " in text
    assert "    1 failed, 41 passed in 60.12s\n" in text
    assert "FAILED tests/unit/x.py::test_b" in text
    assert "12.50s call" in text
