"""What is sent, when, and by which process."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from bench.load.files import trace_rows
from bench.load.plan import Plan, Row, Session, concurrency, conversations, sessions
from bench.sim.trace import tokens_of

SHIPPED = Path(__file__).parents[3] / "bench" / "data" / "mooncake_conversation_trace.jsonl.gz"
RANDOM = Plan("random", "poisson", seed=7, requests=1000, rate=20.0, input=(10, 300), output=(1, 50))
TALKS = replace(RANDOM, dataset="conversations", turns=4)
PREFIXES = replace(RANDOM, dataset="shared-prefix", prefix=64, groups=5)


def trace(rows: tuple[Row, ...]) -> Plan:
    return Plan("trace", "times", seed=7, rows=rows)


@pytest.fixture(scope="module")
def mooncake() -> Plan:
    return trace(trace_rows(str(SHIPPED), skip=0, longest=0)[:2000])


def ours(plan: Plan, part: int = 0, of: int = 1) -> list[Session]:
    return list(sessions(plan, part, of))


@pytest.mark.parametrize("plan", [RANDOM, TALKS, PREFIXES, replace(RANDOM, arrival="burst")])
@pytest.mark.parametrize("of", [2, 3, 7])
def test_the_shares_of_all_processes_are_the_whole_and_nothing_twice(plan: Plan, of: int) -> None:
    shares = [ours(plan, part, of) for part in range(of)]
    assert sorted(itertools.chain(*shares), key=lambda session: session.number) == ours(plan)
    assert min(map(len, shares)) > 0


@pytest.mark.parametrize("of", [2, 5])
def test_a_trace_is_divided_by_conversations_into_equal_parts(mooncake: Plan, of: int) -> None:
    shares = [ours(mooncake, part, of) for part in range(of)]
    assert sorted(session.number for share in shares for session in share) == list(range(len(mooncake.rows)))
    keys = [{session.key for session in share} for share in shares]
    assert all(not one & other for one, other in itertools.combinations(keys, 2))
    assert max(map(len, shares)) - min(map(len, shares)) <= 5


def test_what_continues_an_earlier_prompt_is_its_conversation_and_a_shared_first_block_is_none() -> None:
    def row(*blocks: int, prompt: int = 0) -> Row:
        return Row(prompt=prompt or 512 * len(blocks), output=1, blocks=blocks)

    first, stranger, second = row(1, 2, 3, prompt=1100), row(1, 5, 6), row(1, 2, 7, 8, prompt=2000)
    alone, short = row(1), row(1, prompt=30)
    assert conversations([first, stranger, second, alone, short, row(1, 5, 6, 9)]) == [0, 1, 0, 3, 4, 1]


def test_the_same_seed_is_the_same_work_and_another_is_another() -> None:
    for plan in (RANDOM, TALKS, PREFIXES):
        assert ours(plan) == ours(plan)
        other = ours(replace(plan, seed=8))
        assert [session.at for session in other] != [session.at for session in ours(plan)]
        mine, theirs = ours(plan)[3].turns[0], other[3].turns[0]
        assert mine.tokens(1000).tolist() != theirs.tokens(1000).tolist()


def test_a_poisson_rate_is_kept_by_the_whole_and_by_each_part() -> None:
    plan = replace(RANDOM, requests=20_000)
    times = np.array([session.at for session in ours(plan)])
    waits = np.diff(times)
    assert len(times) / times[-1] == pytest.approx(20, rel=0.03)
    assert waits.std() == pytest.approx(waits.mean(), rel=0.03), "exponential: as wide as its mean"
    part = np.diff([session.at for session in ours(plan, 1, 4)])
    assert 1 / part.mean() == pytest.approx(5, rel=0.06)
    assert part.std() == pytest.approx(part.mean(), rel=0.06), "thinned by chance, not by turns"


def test_a_duration_ends_what_begins_and_a_number_of_requests_counts_turns() -> None:
    within = ours(replace(RANDOM, requests=0, duration_s=10.0))
    assert max(session.at for session in within) < 10
    assert len(within) == pytest.approx(200, abs=60)
    counted = ours(replace(TALKS, requests=10))
    assert [len(session.turns) for session in counted] == [4, 4, 2]
    numbers = [turn.number for session in counted for turn in session.turns]
    assert numbers == list(range(10))


def test_a_closed_loop_has_no_times_and_no_end_of_its_own() -> None:
    endless = replace(RANDOM, arrival="closed", requests=0, concurrency=7)
    some = list(itertools.islice(sessions(endless, 1, 3), 50))
    assert {session.at for session in some} == {0.0}
    assert [session.number % 3 for session in some] == [1] * 50
    assert [concurrency(endless, part, 3) for part in range(3)] == [3, 2, 2]
    assert concurrency(replace(endless, concurrency=0), 0, 3) == 0, "no limit"


def test_lengths_are_exact_and_cover_their_ranges() -> None:
    turns = [session.turns[0] for session in ours(RANDOM)]
    lengths = [len(turn.tokens(5000)) for turn in turns]
    assert (min(lengths), max(lengths)) == (10, 300)
    assert {turn.output for turn in turns} == set(range(1, 51))
    assert max(int(turn.tokens(7).max()) for turn in turns) == 6


def test_a_group_shares_its_prefix_and_nothing_else() -> None:
    prompts = [session.turns[0].tokens(30_000) for session in ours(PREFIXES)]
    prefixes = {tuple(prompt[:64].tolist()) for prompt in prompts}
    assert len(prefixes) == 5
    assert len({tuple(prompt[64:74].tolist()) for prompt in prompts}) == len(prompts)


def test_a_hash_id_of_a_trace_is_512_tokens_seeded_by_it(mooncake: Plan) -> None:
    number, row = next((number, row) for number, row in enumerate(mooncake.rows) if len(row.blocks) > 2)
    tokens = ours(mooncake)[number].turns[0].tokens(32_000)
    assert len(tokens) == row.prompt
    assert tokens[:512].tolist() == tokens_of(row.blocks[0]).tolist()
    assert tokens[512:600].tolist() == tokens_of(row.blocks[1])[:88].tolist()
    few = ours(mooncake)[number].turns[0].tokens(100)
    assert few.tolist() == (tokens % 100).tolist(), "folded into a small vocabulary: equal blocks stay equal"


def test_a_trace_keeps_its_times_and_a_speed_shortens_them(mooncake: Plan) -> None:
    times = [row.at for row in mooncake.rows]
    assert [session.at for session in ours(mooncake)] == times
    assert [session.at for session in ours(replace(mooncake, speed=4.0))] == [at / 4 for at in times]


def test_a_plan_comes_through_json_as_it_was(mooncake: Plan) -> None:
    for plan in (RANDOM, TALKS, mooncake, Plan("prompts", "closed", rows=(Row(text="Grüße", output=3),))):
        assert Plan.of_json(json.loads(json.dumps(asdict(plan)))) == plan
