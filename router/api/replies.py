"""What becomes of an answer: collected for one JSON body, or written as SSE chunks. Both are request.Reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from protos.v1 import common_pb2
from router.api import shapes
from router.api.sink import DONE, Sink
from router.params import Params
from router.request import Outcome
from router.text.codec import Codec
from router.text.progress import Delta, Finish
from runtime.values import value


@value
class Frame:
    """What every chunk of one call shares."""

    id: str
    created: int
    model: str
    params: Params
    codec: Codec
    include_usage: bool = False


@dataclass(slots=True)
class ChoiceText:
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None


class Collected:
    """The whole answer to one prompt."""

    def __init__(self, n: int) -> None:
        self.choices = [ChoiceText() for _ in range(n)]
        self.prompt_scores: list[common_pb2.TokenLogprob] = []

    def delta(self, delta: Delta) -> None:
        choice = self.choices[delta.choice]
        choice.pieces.append(delta.text)
        choice.tokens.extend(delta.tokens)
        choice.logprobs.extend(delta.logprobs)

    def finished(self, finish: Finish) -> None:
        self.choices[finish.choice].finish = finish

    def prompt_logprobs(self, offset: int, entries: Sequence[common_pb2.TokenLogprob]) -> None:
        self.prompt_scores.extend(entries)

    def step(self) -> None:
        """Nothing is sent before the end."""


def chat_body(frame: Frame, reply: Collected, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    params, codec = frame.params, frame.codec
    choices = []
    for index, choice in enumerate(reply.choices):
        entry: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.pieces), "refusal": None},
            "logprobs": None,
            **_ending(choice.finish),
        }
        if params.logprobs is not None:
            entry["logprobs"] = {"content": shapes.chat_logprobs(codec, choice.logprobs), "refusal": None}
        if params.return_token_ids:
            entry["token_ids"] = choice.tokens
        choices.append(entry)
    body = _body(frame, "chat.completion", choices, outcomes)
    if params.prompt_logprobs is not None:
        body["prompt_logprobs"] = shapes.prompt_logprobs(codec, reply.prompt_scores)
    return body


def completion_body(
    frame: Frame, replies: Sequence[Collected], prompts: Sequence[EchoedPrompt], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """Choices of prompt i have the indices i * n ... i * n + n - 1."""
    choices = []
    for place, (reply, prompt) in enumerate(zip(replies, prompts, strict=True)):
        for number, choice in enumerate(reply.choices):
            entry = {
                "index": place * frame.params.n + number,
                "text": prompt.text + "".join(choice.pieces),
                "logprobs": None,
                **_ending(choice.finish),
            }
            if frame.params.logprobs is not None:
                entry["logprobs"] = _echoed_logprobs(frame, reply.prompt_scores, prompt, choice.logprobs)
            if frame.params.return_token_ids:
                entry["token_ids"] = choice.tokens
            if frame.params.prompt_logprobs is not None:
                entry["prompt_logprobs"] = shapes.prompt_logprobs(frame.codec, reply.prompt_scores)
            choices.append(entry)
    return _body(frame, "text_completion", choices, outcomes)


@value
class EchoedPrompt:
    """What echo puts before an answer: "" and no tokens without echo."""

    text: str = ""
    tokens: tuple[int, ...] = ()


def _echoed_logprobs(
    frame: Frame,
    scores: Sequence[common_pb2.TokenLogprob],
    prompt: EchoedPrompt,
    logprobs: Sequence[common_pb2.TokenLogprob],
) -> dict[str, Any]:
    lists = shapes.CompletionLogprobs(frame.codec, frame.params.logprobs or 0, skip_special=frame.params.skip_special)
    if prompt.tokens:
        return lists.take([*scores, *logprobs], first=prompt.tokens[0])
    return lists.take(logprobs)


def _ending(finish: Finish | None) -> dict[str, Any]:
    return {"finish_reason": shapes.finish_reason(finish), "stop_reason": (finish.stop or None) if finish else None}


def _body(frame: Frame, kind: str, choices: list[dict[str, Any]], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": frame.id,
        "object": kind,
        "created": frame.created,
        "model": frame.model,
        "choices": choices,
        "usage": shapes.usage(outcomes),
    }
    if frame.params.return_ledger:
        body["ledger"] = _ledgers(outcomes)
    return body


def _ledgers(outcomes: Sequence[Outcome]) -> Any:
    """One object for one prompt, a list for several."""
    ledgers = [outcome.ledger.values() for outcome in outcomes]
    return ledgers[0] if len(ledgers) == 1 else ledgers


class _Stream:
    """Chunks of one prompt's choices, written to the call's sink. A frame is bytes joined from prepared parts."""

    kind = ""

    def __init__(self, frame: Frame, sink: Sink, first_index: int = 0) -> None:
        self.frame = frame
        self.sink = sink
        self.first_index = first_index
        head = {"id": frame.id, "object": self.kind, "created": frame.created, "model": frame.model}
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        self._tail = b',"usage":null}\n\n' if frame.include_usage else b"}\n\n"
        self._started: set[int] = set()

    def _chunk(self, choice: int, body: bytes) -> None:
        """body: what follows the choice's index, up to its closing brace."""
        self.sink.write(b"%b%d,%b}]%b" % (self._head, self.first_index + choice, body, self._tail))

    def step(self) -> None:
        self.sink.flush()


class ChatStream(_Stream):
    kind = "chat.completion.chunk"

    def delta(self, delta: Delta) -> None:
        self._role(delta.choice)
        params = self.frame.params
        if params.logprobs is None and not params.return_token_ids:
            if delta.text:
                content = orjson.dumps(delta.text)
                self._chunk(delta.choice, b'"delta":{"content":%b},"logprobs":null,"finish_reason":null' % content)
            return
        body: dict[str, Any] = {"delta": {"content": delta.text}, "logprobs": None, "finish_reason": None}
        if params.logprobs is not None:
            body["logprobs"] = {"content": shapes.chat_logprobs(self.frame.codec, delta.logprobs), "refusal": None}
        if params.return_token_ids:
            body["token_ids"] = list(delta.tokens)
        self._chunk(delta.choice, orjson.dumps(body)[1:-1])

    def finished(self, finish: Finish) -> None:
        self._role(finish.choice)
        body = {"delta": {}, "logprobs": None, **_ending(finish)}
        self._chunk(finish.choice, orjson.dumps(body)[1:-1])

    def prompt_logprobs(self, offset: int, entries: Sequence[common_pb2.TokenLogprob]) -> None:
        raise AssertionError("refused with stream")

    def _role(self, choice: int) -> None:
        if choice in self._started:
            return
        self._started.add(choice)
        self._chunk(choice, b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null')


class CompletionStream(_Stream):
    kind = "text_completion"

    def __init__(self, frame: Frame, sink: Sink, first_index: int, prompt: EchoedPrompt) -> None:
        super().__init__(frame, sink, first_index)
        self._prompt = prompt
        self._scores: list[common_pb2.TokenLogprob] = []
        top, skip = frame.params.logprobs or 0, frame.params.skip_special
        self._lists = [shapes.CompletionLogprobs(frame.codec, top, skip_special=skip) for _ in range(frame.params.n)]

    def delta(self, delta: Delta) -> None:
        self._echo(delta.choice)
        params = self.frame.params
        if params.logprobs is None and not params.return_token_ids:
            if delta.text:
                self._chunk(delta.choice, b'"text":%b,"logprobs":null,"finish_reason":null' % orjson.dumps(delta.text))
            return
        body: dict[str, Any] = {"text": delta.text, "logprobs": None, "finish_reason": None}
        if params.logprobs is not None:
            body["logprobs"] = self._lists[delta.choice].take(delta.logprobs)
        if params.return_token_ids:
            body["token_ids"] = list(delta.tokens)
        self._chunk(delta.choice, orjson.dumps(body)[1:-1])

    def finished(self, finish: Finish) -> None:
        self._echo(finish.choice)
        self._chunk(finish.choice, orjson.dumps({"text": "", "logprobs": None, **_ending(finish)})[1:-1])

    def prompt_logprobs(self, offset: int, entries: Sequence[common_pb2.TokenLogprob]) -> None:
        self._scores.extend(entries)

    def _echo(self, choice: int) -> None:
        if choice in self._started:
            return
        self._started.add(choice)
        if not self._prompt.tokens:
            return
        body: dict[str, Any] = {"text": self._prompt.text, "logprobs": None, "finish_reason": None}
        if self.frame.params.logprobs is not None:
            body["logprobs"] = self._lists[choice].take(self._scores, first=self._prompt.tokens[0])
        self._chunk(choice, orjson.dumps(body)[1:-1])


def write_end(frame: Frame, kind: str, sink: Sink, outcomes: Sequence[Outcome]) -> None:
    """The last events of a stream that went well: usage and ledger where asked for, then [DONE]. Sent by finish()."""
    last: dict[str, Any] = {
        "id": frame.id,
        "object": kind,
        "created": frame.created,
        "model": frame.model,
        "choices": [],
    }
    if frame.include_usage:
        last["usage"] = shapes.usage(outcomes)
    if frame.params.return_ledger:
        last["ledger"] = _ledgers(outcomes)
    if frame.include_usage or frame.params.return_ledger:
        sink.write(b"data: " + orjson.dumps(last) + b"\n\n")
    sink.write(DONE)
