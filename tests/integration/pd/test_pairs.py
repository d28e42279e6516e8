"""Pairs that must not be, or must be careful: other layouts, certificates, shared damage, a source that dies while it
is read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from protos.v1 import common_pb2, decode_pb2
from runtime import rpc
from runtime.config import Config
from runtime.errors import WorkerLost
from tests.integration.pd.conftest import Start
from tests.integration.pd.router_client import Link, Router, request
from tests.integration.pd.workers import baseline
from tests.unit.runtime.certificates import Authority

SHORT = [(i * 13) % 250 for i in range(100)]


async def test_workers_of_different_layout_are_refused_as_a_pair_with_both_values(start: Start) -> None:
    """Public report T133 (vllm-project/vllm#42895)."""
    p, d = await asyncio.gather(start("prefill", chunk_tokens=256), start("decode"))
    router = await Router(p, d).open()
    work = request(SHORT)
    await router.submit_both(work)
    await router.forward(work)
    failed = (await router.d.next(work.ref)).failed
    assert (failed.error.reason, failed.kv_lost, failed.error.retryable) == ("layout_mismatch", False, False)
    assert "512" in failed.error.message
    assert "256" in failed.error.message
    await router.cancel(work)
    await baseline(p, d)
    assert len((await router.local(request(SHORT))).tokens[0]) == 8


async def test_with_certificates_everything_between_workers_is_mutual_tls(start: Start, tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    tls = {name: authority.issue(name) for name in ("prefill", "decode")}
    p, d = await asyncio.gather(start("prefill", **tls["prefill"]), start("decode", **tls["decode"]))
    router = await Router(p, d).open()
    answer = await router.disaggregated(request(SHORT))
    assert answer.tokens == (await router.local(request(SHORT))).tokens
    await baseline(p, d)
    stranger = Authority.create(tmp_path / "other").issue("prefill")
    await p.close_channel()
    p.channel = rpc.channel(p.address, Config.load(stranger))
    with pytest.raises((grpc.aio.AioRpcError, WorkerLost)):
        await Link(p, "prefill", "stranger").open()


async def test_two_requests_that_share_damaged_pages_are_both_right(start: Start) -> None:
    """Public report T016 (vllm-project/vllm#49250)."""
    p, d = await asyncio.gather(start("prefill"), start("decode", {"PDSERVE_FAULTS": "kv.bytes=corrupt*2"}))
    router = await Router(p, d).open()
    same = SHORT[:64]
    answers = await asyncio.gather(*(router.disaggregated(request(same, max_tokens=24)) for _ in range(2)))
    third = await router.disaggregated(request(same, max_tokens=24))
    local = await router.local(request([*same], max_tokens=24))
    assert [a.tokens for a in answers] == [local.tokens] * 2
    assert third.tokens == local.tokens
    await baseline(p, d)


async def test_a_source_that_dies_after_its_reader_gave_up_leaves_no_page_in_quarantine(start: Start) -> None:
    """Public report T159 (vllm-project/vllm#46283)."""
    p, d = await asyncio.gather(start("prefill"), start("decode", {"PDSERVE_FAULTS": "kv.read=delay:0.3"}))
    router = await Router(p, d).open()
    works = [request([index, *SHORT]) for index in range(6)]
    for work in works:
        await router.submit_both(work)
        await router.forward(work)
    await asyncio.sleep(0.1)
    for work in works:
        await router.d.send(cancel=common_pb2.Cancel(ref=work.ref))
    await p.kill()
    await baseline(d, seconds=3.0)
    local = await router.local(request(SHORT))
    assert len(local.tokens[0]) == 8


async def test_one_failed_read_of_eight_costs_one_request(start: Start) -> None:
    """Public report T140 (llm-d/llm-d#191; vllm-project/vllm#41863)."""
    p, d = await asyncio.gather(start("prefill"), start("decode", {"PDSERVE_FAULTS": "kv.read=fail:transfer_failed*1"}))
    router = await Router(p, d).open()
    prompts = [[index, *SHORT] for index in range(8)]
    works = [request(tokens, max_tokens=10) for tokens in prompts]

    async def end(work: common_pb2.WorkRequest) -> tuple[str, list[int]]:
        await router.submit_both(work)
        await router.forward(work)
        tokens = [(await router.p.next(work.ref)).done.first[0].token]
        while True:
            event: decode_pb2.DecodeEvent = await router.d.next(work.ref)
            match event.WhichOneof("event"):
                case "failed":
                    assert event.failed.kv_lost
                    return "failed", []
                case "tokens":
                    tokens += event.tokens.tokens
                    if event.tokens.finish:
                        return "done", tokens

    ends = await asyncio.gather(*(end(work) for work in works))
    assert sorted(kind for kind, _ in ends) == ["done"] * 7 + ["failed"]
    for tokens, (kind, said) in zip(prompts, ends, strict=True):
        if kind == "done":
            assert [said] == (await router.local(request(tokens, max_tokens=10))).tokens
        else:
            await router.p.send(cancel=common_pb2.Cancel(ref=works[prompts.index(tokens)].ref))
    await baseline(p, d)
