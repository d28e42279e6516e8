"""The front door's one way in, shared by HTTP and gRPC: admit -> render -> dispatch -> account.

Both faces turn their input into a Call and their output from Replies; nothing here knows of either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.admission.tenants import OPEN, Keys, Permits, Salts, Tenant
from router.dispatch.dispatch import Dispatcher
from router.params import Limits, Params, check, check_prompt, clamp, sampling, wire_retention
from router.request import Ledger, Outcome, Reply, Work
from router.stats import Stats
from router.text.codec import Codec, Message, Rendered
from router.text.progress import LENGTH, Finish
from runtime.clock import Clock
from runtime.config import Config
from runtime.errors import DeadlineExceeded, InvalidRequest, NotFound, PdserveError, let_go
from runtime.ids import child_traceparent, new_request_id
from runtime.values import value


@value
class Chat:
    messages: Sequence[Message]
    add_generation_prompt: bool = True


Prompt = Chat | str | list[int]


@value
class Call:
    """One API call. `field`: the name of the prompt field in this API, for refusals. timeout_s: the caller's own
    deadline, if shorter than the router's."""

    prompts: Sequence[Prompt]
    params: Params
    model: str | None = None
    field: str = "prompt"
    traceparent: str = ""
    session: str = ""
    timeout_s: float | None = None
    tenant: Tenant = OPEN
    request_id: str = ""


@dataclass(slots=True)
class Prepared:
    """Rendered and checked: one Work per prompt."""

    works: list[Work] = field(default_factory=list)
    render_s: float = 0.0


class Front:
    def __init__(
        self,
        codec: Codec,
        dispatcher: Dispatcher,
        limits: Limits,
        config: Config,
        clock: Clock,
        stats: Stats,
        model: str,
        fingerprint: str,
        keys: Keys,
    ) -> None:
        self.codec = codec
        self.dispatcher = dispatcher
        self.limits = limits
        self.config = config
        self.clock = clock
        self.stats = stats
        self.model = model
        self.fingerprint = fingerprint
        self.keys = keys
        self.salts = Salts(config.cache_salt_secret)
        self.permits = Permits(config.max_inflight)

    def check_model(self, name: str | None) -> None:
        """Raises NotFound(reason="model_not_found")."""
        if name is not None and name != self.model:
            raise NotFound(f"the model does not exist here; {self.model} does", reason="model_not_found", field="model")

    async def prepare(self, call: Call) -> Prepared:
        """Check everything, render and tokenize. Raises InvalidRequest, NotFound: no worker has heard of it yet."""
        arrived = self.clock.monotonic()
        self.check_model(call.model)
        check(call.params, self.limits)
        if not 1 <= len(call.prompts) <= self.limits.max_prompts:
            raise InvalidRequest(
                "there must be at least one prompt, and not too many",
                field=call.field,
                limit=f"1..{self.limits.max_prompts}",
            )
        tokens = [await self.tokens(prompt, call.field) for prompt in call.prompts]
        for ids in tokens:
            check_prompt(ids, self.limits, call.field)
        now = self.clock.monotonic()
        works = [self._work(call, ids, arrived, index) for index, ids in enumerate(tokens)]
        return Prepared(works, now - arrived)

    async def tokens(self, prompt: Prompt, name: str) -> list[int]:
        if isinstance(prompt, Chat):
            return (await self.render(prompt)).tokens
        if isinstance(prompt, str):
            return await self.codec.encode(prompt, add_special=True, field=name)
        return prompt

    async def render(self, chat: Chat) -> Rendered:
        """Raises InvalidRequest."""
        if not 1 <= len(chat.messages) <= self.limits.max_messages:
            raise InvalidRequest(
                "there must be at least one message, and not too many",
                field="messages",
                limit=f"1..{self.limits.max_messages}",
            )
        return await self.codec.chat(chat.messages, add_generation_prompt=chat.add_generation_prompt)

    def _work(self, call: Call, tokens: list[int], arrived: float, index: int) -> Work:
        params = clamp(call.params, len(tokens), self.limits)
        scoring = params.max_tokens == 0
        timeout = self.config.request_timeout_s
        if call.timeout_s is not None:
            timeout = min(timeout, call.timeout_s)
        base = call.request_id or new_request_id()
        salt = self.salts.of(call.tenant, params.cache_salt)
        return Work(
            request_id=f"{base}-{index}" if len(call.prompts) > 1 else base,
            tokens=tuple(tokens),
            params=params,
            sampling=sampling(params, self.codec.eos),
            salt=salt,
            deadline=arrived + timeout,
            arrived=arrived,
            tenant=call.tenant.name,
            traceparent=child_traceparent(call.traceparent),
            session=f"{call.tenant.name}/{call.session}" if call.session else "",
            priority=call.tenant.priority,
            scoring=scoring,
            retention=wire_retention(params.retention, salt),
        )

    async def generate(self, prepared: Prepared, replies: Sequence[Reply]) -> list[Outcome]:
        """Run every prompt of a call; the first failure ends the others.

        Raises PdserveError or asyncio.CancelledError; nothing is held afterwards.
        """
        works = prepared.works
        if len(works) == 1:
            outcomes = [await self._one(works[0], replies[0])]
        else:
            outcomes = await self._all(works, replies)
        for outcome in outcomes:
            outcome.ledger.render_s = prepared.render_s
        return outcomes

    async def _one(self, work: Work, reply: Reply) -> Outcome:
        if work.deadline <= self.clock.monotonic():
            raise DeadlineExceeded("the request's deadline passed")
        if work.scoring and not work.sampling.prompt_logprobs:  # an echo and nothing else: no worker is needed
            reply.finished(Finish(0, LENGTH))
            reply.step()
            return Outcome(work.request_id, len(work.tokens), 0, 0, Ledger())
        return await self.dispatcher.run(work, reply)

    async def _all(self, works: Sequence[Work], replies: Sequence[Reply]) -> list[Outcome]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(work, reply)) for work, reply in zip(works, replies, strict=True)]
        except BaseExceptionGroup as failures:
            first = _first(failures)
            for other in (failures, *failures.exceptions):
                if other is not first:
                    let_go(other)
            raise first from failures
        return [task.result() for task in tasks]


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            return _first(failure)
        if isinstance(failure, PdserveError):
            return failure
    return failures.exceptions[0]
