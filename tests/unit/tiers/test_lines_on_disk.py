"""What conversations have left behind, and what they share, is known to a worker that starts again with its disk."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from engine.api import Retention
from engine.successors import Line, Successors
from engine.tiers.journal import Journal, Past, Put, StatePut
from engine.tiers.notes import NOTE_AFTER_S
from engine.tiers.work import Inline, Lane
from kvtransfer.hashing import page_keys
from tests.unit.engine_core.lab import ROOT, prompt, request
from tests.unit.tiers.lab import Manual
from tests.unit.tiers.test_disk import PAGE, DiskLab
from tests.unit.tiers.test_states import ask

SYSTEM = prompt(96, seed=9)


def lab(folder: Path, disk: Lane | None = None, **changes: object) -> DiskLab:
    changes = {"disk_pool_bytes": 999 * PAGE, "host_state_slots": 16, **changes}
    lane = disk or Inline()
    return DiskLab(pages=40, host_pages=60, folder=folder, state=True, changes=changes, lane_of_disk=lane)


def say(made: DiskLab, name: str, tokens: tuple[int, ...], count: int = 18) -> tuple[int, ...]:
    """Ask, and let all of it go down. The conversation so far."""
    _, answer = ask(made, name, tokens, count)
    made.settle()
    made.cool()
    made.check()
    return (*tokens, *answer)


def turn(made: DiskLab, name: str, said: tuple[int, ...], seed: int) -> tuple[int, ...]:
    return say(made, name, (*said, *prompt(20, seed=seed)))


def rule(made: DiskLab) -> Successors:
    assert made.engine.states is not None
    return made.engine.states.successors


def killed(made: DiskLab) -> None:
    """As the kernel does it."""
    assert made.tiers.disk is not None
    made.tiers.disk._disk._folder.close()  # type: ignore[attr-defined]


def order(made: DiskLab) -> list[bytes]:
    """Names of the states on disk, in the order in which they would be evicted."""
    assert made.tiers.disk is not None
    states = made.tiers.disk.states
    found = []
    while len(states):
        victim = states._victim()
        found.append(victim.name)
        states.drop(victim)
    return found


def test_after_a_restart_what_was_left_behind_goes_first_then_what_was_longest_unused(tmp_path: Path) -> None:
    """A system prompt, the oldest of all, and two conversations that share it; one of them has had a second turn."""
    made = lab(tmp_path)
    say(made, "system", SYSTEM, 1)
    say(made, "quiet", (*SYSTEM, *prompt(48, seed=1)))
    said = say(made, "first", (*SYSTEM, *prompt(48, seed=2)))
    turn(made, "second", said, 3)
    assert made.tiers.disk is not None
    length = {state.name: state.length for state in made.tiers.disk.states._all()}
    made.engine.stop()

    fresh = lab(tmp_path)

    left = order(fresh)
    assert sorted(length[name] for name in left[:3]) == [80, 128, 161], "of the prompt alone, and of the first turn"
    assert [length[name] for name in left[3:]] == [161, 128, 96, 199, 176]


def test_what_two_have_shared_is_not_spent_by_the_third_after_a_restart(tmp_path: Path) -> None:
    made = lab(tmp_path)
    say(made, "one", SYSTEM, 1)
    for number in range(2):
        say(made, f"more{number}", (*SYSTEM, *prompt(80, seed=10 + number)), 1)
    system = page_keys(ROOT, SYSTEM)[5]
    made.engine.stop()
    fresh = lab(tmp_path)
    assert fresh.tiers.disk is not None
    (shared,) = fresh.tiers.disk.states._by_key[system]

    for key in list(fresh.tiers.disk.index.following(system)):
        fresh.tiers.disk.index.drop(key)  # or it would be known by what follows it
    say(fresh, "third", (*SYSTEM, *prompt(80, seed=20)))

    assert not rule(fresh).spent(shared.name)


def test_one_that_has_been_resumed_once_is_shared_by_who_resumes_it_after_the_restart(tmp_path: Path) -> None:
    made = lab(tmp_path)
    said = say(made, "first", prompt(48, seed=2))
    turn(made, "second", said, 3)
    made.engine.stop()
    fresh = lab(tmp_path)
    assert fresh.tiers.disk is not None
    ends = [s for s in fresh.tiers.disk.states._all() if s.length == len(said) - 1]
    assert [rule(fresh).spent(state.name) for state in ends] == [True]

    say(fresh, "aside", (*said, *prompt(20, seed=4)))

    assert [rule(fresh).spent(state.name) for state in ends] == [False]


def test_a_request_that_is_tried_again_after_a_restart_does_not_spend_what_it_left_itself(tmp_path: Path) -> None:
    made = lab(tmp_path)
    first = prompt(48, seed=2)
    say(made, "first", first, 2)
    made.engine.stop()
    fresh = lab(tmp_path)

    say(fresh, "first", first)

    assert not any(rule(fresh).spent(name) for name in order(fresh))


def test_what_is_said_of_a_state_after_it_was_written_is_written_within_a_second(tmp_path: Path) -> None:
    made = lab(tmp_path)
    said = say(made, "first", prompt(48, seed=2))
    ask(made, "second", (*said, *prompt(20, seed=3)), 1)
    made.engine.turn()
    made.clock.advance(NOTE_AFTER_S)
    made.engine.turn()
    killed(made)

    fresh = lab(tmp_path)

    assert [rule(fresh).spent(name) for name in order(fresh)] == [True, True]


def test_what_is_said_of_a_state_while_it_is_being_written_is_written_down(tmp_path: Path) -> None:
    disk = Manual()
    made = lab(tmp_path, disk)
    said = say_held(made, disk, prompt(48, seed=2))
    key = made.submit(request("second", (*said, *prompt(20, seed=3)), max_tokens=1))
    made.run()
    assert made.ends(key)
    disk.open()
    made.engine.stop()

    fresh = lab(tmp_path)

    assert [rule(fresh).spent(name) for name in order(fresh)][:2] == [True, True]


def say_held(made: DiskLab, disk: Manual, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Ask; its pages are on disk and its states are on their way there."""
    _, answer = ask(made, "first", tokens, 18)
    made.tiers._stores.make_room(made.engine.pages.cached, [])
    made.tiers.poll()
    disk.run_all()
    made.tiers.poll()
    assert made.tiers.state_stores is not None
    made.tiers.state_stores.make_room(made.engine.slots.cached, [], None)
    made.tiers.poll()
    assert len(disk.waiting) == 2
    return (*tokens, *answer)


def test_what_is_said_of_a_page_while_it_is_being_written_is_written_down(tmp_path: Path) -> None:
    disk = Manual()
    made = lab(tmp_path, disk)
    tokens = prompt(48, seed=2)
    ask(made, "first", tokens, 1)
    made.tiers._stores.make_room(made.engine.pages.cached, [])
    made.tiers.poll()
    assert disk.waiting
    key = made.submit(request("again", tokens, max_tokens=1, retention=Retention(priority=7)))
    made.run()
    assert made.ends(key)
    disk.open()
    made.engine.stop()

    fresh = lab(tmp_path)

    retained = fresh.engine._scheduler.memory.retained
    assert [retained.rank(known) for known in page_keys(ROOT, tokens)[:2]] == [7, 7]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_was_said_is_known_after_each_of_many_restarts(tmp_path: Path, seed: int) -> None:
    """Conversations with a common beginning, in any order, some asked again or parted, over a small disk."""
    draw, made = Random(seed), lab(tmp_path, disk_pool_bytes=60 * PAGE)
    talks = [(*SYSTEM, *prompt(20 + number, seed=number)) for number in range(4)]
    spilled, spent = 0, set[bytes]()
    for number in range(30):
        at = draw.randrange(len(talks))
        answered = turn(made, f"r{number}", talks[at][: draw.choice([999, 999, 110])], 100 + number)
        if draw.random() < 0.7:
            talks[at] = answered[:300]
        if number % 5 == 4:
            before = {name: rule(made).line(name) for name in names(made)}
            made.engine.stop()
            spilled += made.tiers.counts.spilled_states
            made = lab(tmp_path, disk_pool_bytes=60 * PAGE)
            assert {name: rule(made).line(name) for name in names(made)} == before
            spent |= {name for name in before if rule(made).spent(name)}
    assert spent
    assert spilled > len(before), "some have gone"
    made.baseline()


def test_a_line_goes_with_its_state_and_is_written_anew_with_it(tmp_path: Path) -> None:
    path = tmp_path / "index"
    name, key, line = b"n" * 32, b"k" * 32, Line(b"maker..1", b"b" * 32, b"maker..2", shared=True)
    state = StatePut(name, key, 16, (), 1, 0.5, (9,), ())
    journal = Journal(path, "x", 1, 1)
    journal.append([Put(key, None, 1, 0, (7,))], states=[state], hints=[(name, Past(line)), (b"o" * 32, Past(line))])
    journal.close()
    for _ in range(2):
        journal = Journal(path, "x", 1, 1)
        assert journal.found.hints == {name: Past(line)}
        journal.close()
    journal = Journal(path, "x", 1, 1)
    journal.append(drops=[name])
    journal.append(states=[state])
    journal.close()
    assert Journal(path, "x", 1, 1).found.hints == {}


def test_nothing_is_remembered_of_what_is_on_disk_no_more(tmp_path: Path) -> None:
    made = lab(tmp_path, disk_pool_bytes=40 * PAGE)
    for number in range(12):
        hint = Retention(priority=number % 3)
        key = made.submit(request(f"r{number}", prompt(64, seed=number), max_tokens=20, retention=hint))
        made.run()
        assert made.ends(key)
        made.settle()
        made.cool()
    assert made.tiers.disk is not None
    notes = made.tiers.disk._notes
    assert 0 < len(notes.hints._noted) <= len(made.tiers.disk.index)
    assert 0 < len(notes.lines._noted) <= len(made.tiers.disk.states) < 24
    made.baseline()


def test_nothing_is_remembered_of_a_page_that_is_given_up_while_it_is_written(tmp_path: Path) -> None:
    """What it hangs on has gone for good meanwhile."""
    disk = Manual()
    made = lab(tmp_path, disk, disk_queue_pages=2)
    tokens = prompt(64, seed=2)
    first = page_keys(ROOT, tokens)[0]
    made.submit(request("first", tokens, max_tokens=1, retention=Retention(priority=3)))
    made.run()
    made.tiers._stores.make_room(made.engine.pages.cached, [])
    made.tiers.poll()
    disk.step()
    made.tiers.poll()
    assert made.tiers.disk is not None
    assert (len(made.tiers.disk.index), len(disk.waiting)) == (2, 1)

    made.engine.cache.clear()
    made.tiers.host.drop(first)
    made.tiers.disk.index.drop(first)
    disk.open()
    made.tiers.poll()

    assert len(made.tiers.disk.index) == 0
    made.baseline()


def names(made: DiskLab) -> list[bytes]:
    """Of the states on disk."""
    assert made.tiers.disk is not None
    return [state.name for state in made.tiers.disk.states._all()]
