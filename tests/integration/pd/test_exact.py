"""Real weights: a hand-over changes nothing. Page bytes first, then log-probabilities, then tokens: trained models hide
most faults of a moved cache from their tokens. Then the same tokens against transformers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from engine.weights import open_weights
from runtime.modelfiles import ModelFiles
from tests.integration.pd.inprocess import LocalWorker, config
from tests.integration.pd.router_client import Answer, Router, request
from tests.integration.pd.workers import WorkerProcess, baseline

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

TEXT = """The river rises in the hills north of the town and runs for forty miles through meadows, past two mills that
have not turned since the war, to a harbour where the herring boats once lay so close that a boy could cross from one
quay to the other without wetting his feet. Nobody fishes there now. The harbour master keeps a list of the ships that
called in the year he was born, and reads it aloud to visitors, who come by train on Sundays. """
LENGTHS = [1, 15, 16, 17, 255, 256, 257]


@functools.cache
def _text() -> list[int]:
    encode = ModelFiles.open("smollm2").encode
    return encode(" ".join(f"{number}. {TEXT}" for number in range(1, 40)), allow_special=False)


def prompt(length: int) -> list[int]:
    """`length` tokens of a text, beginning elsewhere for every length: no two share a prefix."""
    return _text()[length : 2 * length]


class Three:
    """P, D and an aggregated worker with the same weights."""

    def __init__(self, **flags: Any) -> None:
        self.p, self.d, self.both = (
            LocalWorker(role, config("smollm2", **flags)) for role in ("prefill", "decode", "both")
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


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["float32", "bfloat16", "random"])
async def three(request: pytest.FixtureRequest) -> AsyncIterator[Three]:
    flags = {"dtype": "float32", "load_format": "random"} if request.param == "random" else {"dtype": request.param}
    async with Three(**flags) as three:
        yield three


def scores(answer: Answer) -> list[list[tuple[int, float]]]:
    return [[(t.token, t.logprob) for t in one.top] for one in answer.logprobs[0]]


@pytest.mark.parametrize("length", [17, 530])
async def test_pages_log_probabilities_and_tokens_are_those_of_an_aggregated_run(three: Three, length: int) -> None:
    tokens = prompt(length)
    options = {"max_tokens": 20, "logprobs": True, "top_logprobs": 20}
    moved = await three.pd.disaggregated(request(tokens, **options))
    alone = await three.aggregated.local(request(tokens, **options))

    known = tokens + moved.tokens[0]
    full = (len(known) - 1) // 16  # the newest token is in no page yet
    there, here = three.d.page_bytes(known), three.both.page_bytes(known)
    assert there.shape == here.shape
    assert len(there) == full
    assert np.array_equal(there, here)
    assert np.array_equal(three.p.page_bytes(tokens), here[: length // 16])
    assert scores(moved) == scores(alone)
    assert moved.tokens == alone.tokens
    assert moved.handoff is not None
    assert moved.handoff.transfer_pages == -(-length // 16)
    await baseline(three.p, three.d, three.both)


async def test_seeded_sampling_is_the_same_handed_over_and_aggregated(three: Three) -> None:
    options = {"temperature": 1.0, "top_p": 0.95, "seed": 7, "n": 2, "max_tokens": 12}
    tokens = prompt(40)
    moved = await three.pd.disaggregated(request(tokens, **options))
    assert moved.tokens == (await three.aggregated.local(request(tokens, **options))).tokens


# --- against transformers --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> Any:
    """SmolLM2 in fp32, computed by transformers; the weights are copied, which takes it a fifth of reading them."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    files = ModelFiles.open("smollm2")
    source = open_weights(files.path, files.kind, files.config, "auto", 0)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(LlamaConfig(**files.config), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(source.get(name, tuple(value.shape)))
    return model


@pytest.mark.slow
async def test_the_weights_are_those_that_transformers_reads_from_the_same_file(reference: Any) -> None:
    from transformers import AutoModelForCausalLM

    path = ModelFiles.open("smollm2").path
    factory: Any = AutoModelForCausalLM
    theirs = dict(factory.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).named_parameters())
    for name, value in reference.named_parameters():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6)


def greedy_of(reference: Any, tokens: list[int], said: list[int]) -> list[int]:
    """What the reference would say greedily after `tokens`, as long as it has said what `said` says."""
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens + said[:-1]]), use_cache=False).logits[0, len(tokens) - 1 :]
    return [int(t) for t in logits.argmax(-1)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes() -> AsyncIterator[Router]:
    """Two processes over NIXL, fp32."""
    flags = {"model": "smollm2", "dtype": "float32", "kv_pool_tokens": 16384, "listen": "127.0.0.1:0"}
    p, d = WorkerProcess("prefill", flags), WorkerProcess("decode", flags)
    try:
        await asyncio.gather(p.start(), d.start())
        router = await Router(p, d).open()
        yield router
        await router.close()
    finally:
        codes = await p.stop(), await d.stop()
    assert codes == (0, 0), f"{p.log()}\n{d.log()}"


async def _as_transformers(router: Router, reference: Any, tokens: list[int], count: int) -> None:
    answer = await router.disaggregated(request(tokens, max_tokens=count))
    said = answer.tokens[0]
    assert len(said) == count
    assert said == greedy_of(reference, tokens, said)
    assert answer.handoff is not None
    assert answer.handoff.recomputed_tokens == 0
    assert answer.handoff.transfer_pages > 0


@pytest.mark.parametrize("length", LENGTHS)
async def test_greedy_tokens_after_a_hand_over_are_those_of_transformers(
    processes: Router, reference: Any, length: int
) -> None:
    await _as_transformers(processes, reference, prompt(length), 16)


TWENTY = [1, 2, 7, 15, 16, 17, 31, 33, 64, 100, 129, 255, 256, 257, 400, 511, 513, 768, 1024, 1500]


@pytest.mark.slow
@pytest.mark.parametrize("length", TWENTY)
async def test_twenty_prompts_of_sixty_four_tokens_are_those_of_transformers(
    processes: Router, reference: Any, length: int
) -> None:
    await _as_transformers(processes, reference, prompt(length), 64)


async def test_a_question_is_answered(processes: Router) -> None:
    files = ModelFiles.open("smollm2")
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    tokens = files.encode(text, allow_special=True)
    answer = await processes.disaggregated(request(tokens, max_tokens=20, stop_token_ids=[2]))
    assert "Paris" in files.tokenizer().decode(answer.tokens[0])
