"""Who runs, who waits, who gives way; and that none of it changes a token."""

from __future__ import annotations

from engine.api import Admitted, Mode, Tokens
from engine.plan import SamplingParams, StepPlan, StepResult
from tests.unit.engine_core.lab import Lab, expected, hand_off, move, prompt, request, undisturbed


def plans_of(lab: Lab) -> list[StepPlan]:
    plans: list[StepPlan] = []
    run = lab.oracle.run

    def watched(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return run(plan)

    lab.oracle.run = watched  # type: ignore[method-assign]
    return plans


def test_decode_rows_come_first_and_prefill_is_whole_chunks_within_the_budget() -> None:
    lab = Lab(pages=200, changes={"max_batched_tokens": 70})
    plans = plans_of(lab)
    lab.submit(request("old", prompt(10), max_tokens=50))
    lab.turns(1)
    for name in "abc":
        lab.submit(request(name, prompt(100, seed=ord(name)), max_tokens=3))
    lab.run()
    for plan in plans[1:]:
        kinds = [row.is_decode for row in plan.rows]
        assert kinds == sorted(kinds, reverse=True)
        assert sum(len(row.tokens) for row in plan.rows) <= 70
    assert [len(row.tokens) for row in plans[1].rows] == [1, 32, 32]
    assert all(row.start % 32 == 0 for plan in plans for row in plan.rows if not row.is_decode)


def test_a_full_batch_of_decodes_does_not_starve_a_prefill() -> None:
    lab = Lab(changes={"max_batched_tokens": 32})
    for name in "abc":
        lab.submit(request(name, prompt(10, seed=ord(name)), max_tokens=100))
    lab.turns(4)
    late = lab.submit(request("late", prompt(64), max_tokens=1))
    lab.turns(2)
    assert lab.ends(late) == 1


def test_no_more_choices_run_than_the_batch_holds() -> None:
    lab = Lab(pages=200)
    plans = plans_of(lab)
    keys = [lab.submit(request(f"{i}", prompt(20, i), n=2, max_tokens=6, temperature=1.0, seed=i)) for i in range(5)]
    lab.run()
    assert max(len(plan.rows) for plan in plans) == 4
    assert all(lab.ends(key) == 1 for key in keys)


def test_the_same_submissions_make_the_same_plans() -> None:
    made = []
    for _ in range(2):
        lab = Lab(pages=20)
        plans = plans_of(lab)
        for i in range(6):
            lab.submit(request(f"{i}", prompt(30 + 7 * i, i % 2), max_tokens=20, n=1 + i % 2))
        lab.run()
        made.append(plans)
    assert made[0] == made[1]


def test_an_urgent_request_overtakes_those_that_wait() -> None:
    lab = Lab(changes={"max_batch": 1})
    lab.submit(request("running", prompt(10), max_tokens=5))
    lab.turns(1)
    late = lab.submit(request("plain", prompt(10), max_tokens=5))
    urgent = lab.submit(request("urgent", prompt(10), max_tokens=5, priority=-1))
    lab.run()
    order = [e.key for e in lab.events if isinstance(e, Tokens) and e.last]
    assert order[1:] == [urgent, late]


def test_admission_takes_the_decode_headroom_with_it() -> None:
    """Seven pages; A needs 4 and one of headroom, B needs 3 and one: they must not half-admit each other.
    Public report T021 (vllm-project/vllm#57104)."""
    p, d = Lab(), Lab(pages=7)
    a = request("a", prompt(60), Mode.REMOTE, max_tokens=20)
    b = request("b", prompt(44, seed=3), Mode.REMOTE, max_tokens=20)
    sources = [p.submit(request(r.key.request_id, r.tokens, Mode.SOURCE, max_tokens=20)) for r in (a, b)]
    p.run()
    d.submit(a)
    d.submit(b)
    d.run()
    assert d.of(b.key) == []
    for source, r in zip(sources, (a, b), strict=True):
        move(p, d, p.admitted(source), d.admitted(r.key))
        d.engine.start(r.key, p.done(source).first)
        d.admitted(r.key).hold.release()
        d.run()
    assert d.tokens(a.key) == expected(60, 20)[1:]
    assert d.tokens(b.key) == expected(44, 20, seed=3)[1:]
    d.engine.check_baseline()


def test_a_finished_load_runs_although_the_head_of_the_queue_is_stuck() -> None:
    """Public report T123 (vllm-project/vllm#45388)."""
    p, d = Lab(), Lab(pages=12)
    loading = request("b", prompt(100), Mode.REMOTE, max_tokens=10)
    source = p.submit(request("b", prompt(100), Mode.SOURCE, max_tokens=10))
    p.run()
    d.submit(loading)
    d.run()
    stuck = d.submit(request("a", prompt(120, seed=2), max_tokens=10, priority=-5))
    d.run()
    assert d.of(stuck) == []
    move(p, d, p.admitted(source), d.admitted(loading.key))
    d.engine.start(loading.key, p.done(source).first)
    d.admitted(loading.key).hold.release()
    d.run()
    assert d.tokens(loading.key) == expected(100, 10)[1:]
    assert d.tokens(stuck) == expected(120, 10, seed=2)


def test_the_latest_request_gives_way_when_pages_run_out_and_says_the_same() -> None:
    lab = Lab(pages=10)
    keys = [lab.submit(request(f"{i}", prompt(40, i), max_tokens=60)) for i in range(2)]
    lab.run()
    assert [lab.tokens(key) for key in keys] == [expected(40, 60, i) for i in range(2)]
    last = [next(e for e in lab.of(key) if isinstance(e, Tokens) and e.last) for key in keys]
    assert last[0].recomputed_tokens == 0
    assert last[1].recomputed_tokens > 0
    lab.engine.check_baseline()


def test_a_preempted_hand_off_is_recomputed_here_and_waits_for_nothing() -> None:
    """Public report T084 (vllm-project/vllm#53250)."""
    p, d = Lab(), Lab(pages=12, changes={"prefix_cache": False})
    old = d.submit(request("old", prompt(50), max_tokens=90))
    d.turns(2)
    hand_off(p, d, "a", prompt(40, 1), max_tokens=60)
    d.run()
    key = request("a", prompt(40, 1), Mode.REMOTE).key
    last = next(e for e in d.of(key) if isinstance(e, Tokens) and e.last)
    assert last.recomputed_tokens > 60
    assert d.tokens(key) == expected(40, 60, 1)[1:]
    assert d.tokens(old) == expected(50, 90)
    assert sum(isinstance(e, Admitted) for e in d.of(key)) == 1
    d.engine.check_baseline()


def test_forked_choices_are_preempted_one_by_one_and_say_the_same() -> None:
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=9)
    for state in (False, True):
        lab = Lab(pages=11, state=state)
        key = lab.submit(request("a", prompt(40), n=3, max_tokens=60, temperature=1.0, seed=9))
        lab.run()
        assert tuple(tuple(lab.tokens(key, c)) for c in range(3)) == undisturbed(prompt(40), sampling, 3, state)
        last = next(e for e in lab.of(key) if isinstance(e, Tokens) and e.last)
        assert last.recomputed_tokens > 0
        lab.engine.check_baseline()


def test_a_prompt_that_waits_for_the_chunks_of_others_says_so_and_not_that_it_computed() -> None:
    """Chunks of 32, one a step of a second; the first two prompts share their last step."""
    lab = Lab(pages=200, changes={"max_batched_tokens": 32})
    run = lab.oracle.run

    def slow(plan: StepPlan) -> StepResult:
        lab.clock.advance(1.0)
        return run(plan)

    lab.oracle.run = slow  # type: ignore[method-assign]
    lengths = {"long": 48, "short": 16, "last": 64}
    keys = {name: request(name, prompt(length, seed=length), Mode.SOURCE) for name, length in lengths.items()}
    for work in keys.values():
        lab.submit(work)
    lab.run()
    said = {name: (lab.done(work.key).queue_s, lab.done(work.key).prefill_s) for name, work in keys.items()}
    assert said == {"long": (0.5, 1.5), "short": (1.5, 0.5), "last": (2.0, 2.0)}
