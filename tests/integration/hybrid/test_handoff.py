"""A hybrid model handed over: latent pages and state slots in one ticket. Bytes first, then log-probabilities, tokens.

Random weights with every feature on (standard deviation 0.1): such a model reacts to nearly any fault in its state.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from kvtransfer import hashing
from kvtransfer.checksum import memory
from runtime.modelfiles import ModelFiles
from tests.integration.pd.inprocess import LocalWorker, config
from tests.integration.pd.router_client import Answer, Router, request
from tests.integration.pd.workers import baseline
from tests.unit.hybrid.models import CONFIGS, config_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

VOCAB = 516


def model_folder(path: Path, name: str) -> str:
    """tests.unit.hybrid's config with tiny-kimi's tokenizer; weights are made from the seed."""
    shutil.copytree(ModelFiles.open("tiny-kimi").path, path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = config_of(name)
    nested = {"text_config": {**config["text_config"], "vocab_size": VOCAB}} if "text_config" in config else {}
    changed = {**config, "vocab_size": VOCAB, **nested}
    (path / "config.json").write_text(json.dumps(changed))
    return str(path)


class Three:
    """P, D and an aggregated worker of one model."""

    def __init__(self, model: str) -> None:
        self.p, self.d, self.both = (
            LocalWorker(role, config(model, load_format="random", dtype="float32", max_batch=8, chunk_tokens=256))
            for role in ("prefill", "decode", "both")
        )

    async def __aenter__(self) -> Three:
        for worker in (self.p, self.d, self.both):
            await worker.start()
        self.pd = await Router(self.p, self.d).open()
        self.aggregated = await Router(self.both, self.both).open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.pd.close()
        await self.aggregated.close()
        await asyncio.gather(*(w.stop() for w in (self.p, self.d, self.both)))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[n for n in CONFIGS if "-" not in n])
async def three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Three]:
    folder = model_folder(tmp_path_factory.mktemp("model") / request.param, request.param)
    async with Three(folder) as three:
        yield three


def tokens_of(length: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(4, VOCAB, length)]


def cached(worker: LocalWorker, tokens: list[int]) -> tuple[bytes, dict[str, bytes], int]:
    """What the cache holds of `tokens`: the full pages' bytes, the deepest state's, and that state's length."""
    engine, files = worker.parts.engine, ModelFiles.open(worker._config.model)
    assert engine.states is not None
    keys = hashing.page_keys(hashing.root(b"", files.name, files.fingerprint()), tokens)
    match = engine.states.match(keys, tokens)
    assert match.state is not None
    names = {c.name: c.paged for c in engine.model.components}
    views = {r.component: memory(r).reshape(-1, r.stride) for r in engine.regions()}
    pages = b"".join(views[n][match.pages].tobytes() for n, paged in names.items() if paged)
    return pages, {n: views[n][match.state.slot].tobytes() for n in names if not names[n]}, match.resumed


def scores(answer: Answer) -> list[list[tuple[int, float]]]:
    return [[(t.token, t.logprob) for t in one.top] for one in answer.logprobs[0]]


def sizes(worker: LocalWorker) -> tuple[int, int]:
    model = worker.parts.engine.model
    return model.page_bytes, model.slot_bytes


@pytest.mark.parametrize("length", [17, 100, 300])
async def test_pages_state_scores_and_tokens_are_those_of_an_aggregated_run(three: Three, length: int) -> None:
    tokens = tokens_of(length, length)
    options = {"max_tokens": 20, "logprobs": True, "top_logprobs": 20}
    moved = await three.pd.disaggregated(request(tokens, **options))
    alone = await three.aggregated.local(request(tokens, **options))
    assert scores(moved) == scores(alone)
    assert moved.tokens == alone.tokens

    # the end of the turn: the newest token is in no page and no state yet
    known = tokens + moved.tokens[0]
    there, here = cached(three.d, known), cached(three.both, known)
    assert there == here
    assert there[2] == len(known) - 1
    # the end of the prompt, as P has kept it: where the prompt and one token more resume
    assert cached(three.p, [*tokens, 0])[2] == length

    page, slot = sizes(three.d)
    assert moved.handoff is not None
    assert moved.handoff.transfer_bytes == -(-length // 16) * page + slot
    await baseline(three.p, three.d, three.both)


async def test_a_cached_prefix_shortens_prefill_and_pages_but_the_state_comes_whole(three: Three) -> None:
    """The same prompt again: P replays what is past its checkpoint, D reads the pages it lacks and the whole slot."""
    tokens = tokens_of(110, 7)
    first = await three.pd.disaggregated(request(tokens, max_tokens=10))
    again = await three.pd.disaggregated(request(tokens, max_tokens=10))
    assert again.tokens == first.tokens
    assert again.prefill is not None
    assert again.handoff is not None
    assert again.prefill.cached_tokens == 96  # of 110: floor16(109)
    page, slot = sizes(three.d)
    assert again.handoff.transfer_bytes == 1 * page + slot  # D has six of the seven pages
    await baseline(three.p, three.d)


async def test_the_next_turn_resumes_from_the_exact_end_of_the_last_one(three: Three) -> None:
    """At P the prompt's end, off the page grid; in an aggregated worker the end of the answer."""
    tokens = tokens_of(75, 9)
    said = (await three.pd.disaggregated(request(tokens, max_tokens=12))).tokens[0]
    assert said == (await three.aggregated.local(request(tokens, max_tokens=12))).tokens[0]
    turn = [*tokens, *said, *tokens_of(30, 10)]
    moved = await three.pd.disaggregated(request(turn, max_tokens=8))
    alone = await three.aggregated.local(request(turn, max_tokens=8))
    assert moved.prefill is not None
    assert alone.final is not None
    assert moved.prefill.cached_tokens == 75
    assert alone.final.cached_tokens == 75 + 12 - 1
    assert moved.tokens == alone.tokens
    await baseline(three.p, three.d, three.both)


async def test_choices_of_one_prompt_fork_state_and_pages(three: Three) -> None:
    tokens = tokens_of(40, 3)
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 7, "n": 3, "max_tokens": 12}
    moved = await three.pd.disaggregated(request(tokens, **options))
    assert moved.tokens == (await three.aggregated.local(request(tokens, **options))).tokens
    assert len({tuple(t) for t in moved.tokens}) == 3
    await baseline(three.p, three.d, three.both)


async def test_workers_that_decode_through_records_hand_over_and_resume_as_plain_ones(tmp_path: Path) -> None:
    """P and D with records against an aggregated worker without. The second turn resumes from an end kept with records
    in its slot at D's side and from the prompt's end at P; greedy tokens of a model that can decide."""
    folder = model_folder(tmp_path / "kimi_linear", "kimi_linear")
    plain = config(folder, load_format="random", dtype="float32", max_batch=8, chunk_tokens=256)
    records = plain.model_copy(update={"deterministic": False, "replay_ssm": True})
    p, d, both, alone = (
        LocalWorker(role, changed)
        for role, changed in (("prefill", records), ("decode", records), ("both", records), ("both", plain))
    )
    workers = (p, d, both, alone)
    for worker in workers:
        await worker.start()
    routers = [await Router(*ends).open() for ends in ((p, d), (both, both), (alone, alone))]
    pd, recorded, reference = routers
    try:
        tokens = tokens_of(75, 9)
        for turn in range(3):
            options = {"max_tokens": 23, "logprobs": True, "top_logprobs": 20}
            right = await reference.local(request(tokens, **options))
            for answer in (
                await pd.disaggregated(request(tokens, **options)),
                await recorded.local(request(tokens, **options)),
            ):
                assert answer.tokens == right.tokens
                for mine, theirs in zip(scores(answer), scores(right), strict=True):
                    told = dict(mine)
                    assert max(abs(told.get(t, v) - v) for t, v in theirs) <= 1e-4 * max(abs(v) for _, v in theirs)
            tokens = [*tokens, *right.tokens[0], *tokens_of(11, turn)]
        await baseline(*workers)
    finally:
        for router in routers:
            await router.close()
        await asyncio.gather(*(worker.stop() for worker in workers))
