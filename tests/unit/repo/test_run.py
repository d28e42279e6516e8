from __future__ import annotations

from tests.run import LANES, ROOT, Lane, page, summary

OUTPUT = """
....F
============ slowest durations ============
12.50s call     tests/faults/test_faults.py::test_a
FAILED tests/unit/x.py::test_b - AssertionError
=========== 1 failed, 41 passed in 60.12s ===========
""".splitlines()


def test_the_page_says_when_of_what_with_what_result_and_what_was_slow() -> None:
    text = page({"unit": OUTPUT, "processes": ["5 passed in 1.00s"]}, 1)
    assert "exit status 1" in text
    assert "commit " in text
    assert "## unit\n\n    1 failed, 41 passed in 60.12s\n" in text
    assert "FAILED tests/unit/x.py::test_b" in text
    assert "12.50s call" in text
    assert "## processes\n\n    5 passed in 1.00s\n" in text


def test_every_test_is_in_one_lane_but_those_that_need_a_gpu() -> None:
    run = [folder for folders in LANES.values() for folder in folders]
    for path in (ROOT / "tests").rglob("test_*.py"):
        where = path.relative_to(ROOT).as_posix()
        lanes = [folder for folder in run if where.startswith(f"{folder}/")]
        assert len(lanes) == (not where.startswith("tests/gpu/")), where


def test_a_lane_keeps_what_was_printed_and_how_it_ended() -> None:
    lane = Lane("x", ["sh", "-c", "echo '== 3 passed in 0.1s =='; exit 5"], live=False)
    lane.run()
    assert (lane.status, summary(lane.lines)) == (5, "3 passed in 0.1s")
