"""What a short request costs the router, part by part: each called by itself in a loop, warm.

In the router the same code is colder (a request comes back to each part after a thousand other calls), so the sum is a
lower bound, and what the bench calls the rest is that, the event loop, its tasks, the server library and gRPC.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench._http_load import body
from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from router.api import replies, schema
from router.params import Limits, check, check_prompt, clamp, model_defaults, sampling
from router.policy import pairing
from router.request import Ledger, Outcome
from router.stats import Stats
from router.text.codec import Codec
from router.text.progress import GOES_ON, LENGTH, Progress
from runtime import logs
from runtime.config import Config
from runtime.ids import child_traceparent, new_request_id
from runtime.metrics import Metrics
from runtime.modelfiles import ModelFiles

ROUNDS, REPEATS = 5, 300


def microseconds(call: Callable[[], Any]) -> float:
    """CPU time of one call: the best of some rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(REPEATS):
            call()
        best = min(best, time.process_time() - started)
    return best / REPEATS * 1e6


def parts(model: str) -> dict[str, float]:
    """Microseconds by part, in the order of a request's life."""
    files, config = ModelFiles.open(model), Config(model=model)
    limits = Limits.of(config, files.vocab_size, files.max_model_len)
    codec = Codec(files, limits, ThreadPoolExecutor(1))
    defaults = model_defaults(files.generation_config)
    raw = body(model, stream=False, tokens=4)
    given = schema.parse(raw, schema.ChatBody)
    chat = schema.chat_of(given.messages, True, limits)
    assert codec._template is not None
    text = codec._template.render(chat.messages, add_generation_prompt=True)
    tokens = files.encode(text, allow_special=True)
    params = clamp(schema.params_of(given, defaults), len(tokens), limits)
    wire = sampling(params, codec.eos)
    ref = common_pb2.AttemptRef(request_id=new_request_id(), attempt=1)
    states = [
        pairing.WorkerState(name, role, True, 0, 0, 1, 8192, "g")
        for name, role in (("p", pairing.Role.PREFILL), ("d", pairing.Role.DECODE))
    ]
    collected = replies.Collected(1)
    ledger = Ledger(prefill_worker="p", decode_worker="d", total_s=0.02, first_token_s=0.01)
    outcome = Outcome(ref.request_id, len(tokens), 4, 0, ledger)
    frame = replies.Frame("chatcmpl-x", 0, model, params, codec)
    logs.setup(config, stream=io.StringIO(), role="router")
    stats = Stats(Metrics())

    def checked() -> None:
        found = schema.params_of(schema.parse(raw, schema.ChatBody), defaults)
        check(found, limits)
        schema.chat_of(given.messages, True, limits)
        check_prompt(tokens, limits)
        sampling(clamp(found, len(tokens), limits), codec.eos)

    def submitted() -> None:
        command = decode_pb2.DecodeCommand()
        for work in (prefill_pb2.PrefillCommand().submit, command.submit.request):
            work.ref.CopyFrom(ref)
            work.tokens.extend(tokens)
            work.sampling.CopyFrom(wire)
            work.prompt_len, work.n, work.remaining_ms, work.traceparent = len(tokens), 1, 1, "0" * 55
        command.SerializeToString()
        command.SerializeToString()

    def answered() -> None:
        progress = Progress.of(params, codec.decoder(skip_special=True), tokens, frozenset(wire.stop_token_ids))
        for sequence in range(4):
            progress.accept(0, sequence, tokens[-1:], (), LENGTH if sequence == 3 else GOES_ON)

    def recorded() -> None:
        with stats.request("tenant", ref.request_id) as record:
            record.completed([outcome])

    measured: dict[str, Callable[[], Any]] = {
        "read and check the body, sampling": checked,
        "render the chat template": lambda: codec._template.render(chat.messages, add_generation_prompt=True),  # type: ignore[union-attr]
        f"tokenize {len(tokens)} tokens": lambda: codec._encode_rendered(text),
        "identifiers": lambda: (new_request_id(), child_traceparent("")),
        "choose the workers": lambda: pairing.choose(states, 100, frozenset(), frozenset()),
        "two submissions as protobuf": submitted,
        "four tokens to text": answered,
        "the answer's body": lambda: replies.chat_body(frame, collected, [outcome]),
        "metrics and the log line": recorded,
    }
    return {name: microseconds(call) for name, call in measured.items()}
