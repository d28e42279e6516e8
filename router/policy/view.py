"""Plain state a decision is made from: the workers as this router sees and books them, and one request.

A WorkerView is facts (what the worker said of itself) and an account (what the ledger has promised it and not yet got
back). The ledger writes the account; policies only read. Nothing here does I/O or looks at a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.policy.index import NO_HIT, Hit
from router.policy.keys import Keys
from router.policy.pairing import Role

Key = tuple[str, int]
"""(request id, attempt)"""


@dataclass(slots=True)
class Work:
    """One prompt a worker has accepted and not answered. seconds: predicted. order: due time, then arrival. done_s:
    what is done of it, when it is not the one that runs."""

    seconds: float
    tokens: int
    order: tuple[float, int]
    done_s: float = 0.0

    @property
    def left_s(self) -> float:
        """Never nothing: what is late is not done."""
        return max(self.seconds - self.done_s, 0.1 * self.seconds)


@dataclass(slots=True, eq=False)
class WorkerView:
    """bit: its place in the index. Capacity in tokens and slots; 0 = unknown, not limited. group: whoever shares it may
    exchange pages. bytes_per_token and state_bytes: what a hand-off from here moves."""

    worker_id: str
    role: Role
    bit: int = 0
    group: str = ""
    usable: bool = True
    max_model_len: int = 1 << 40
    kv_tokens: int = 0
    slots: int = 0
    max_batch: int = 0
    bytes_per_token: float = 0.0
    state_bytes: float = 0.0
    # account: prefill
    work: dict[Key, Work] = field(default_factory=dict)
    head: Key | None = None  # of the work that runs now, as far as we know: workers run what is due first
    head_since: float = 0.0  # when it began, or went on
    prefill_tokens: int = 0  # uncached tokens of `work`
    # account: decode
    decoding: int = 0  # requests placed here for decoding, arrived or not
    landing: int = 0  # of these, hand-offs on their way
    context_tokens: int = 0  # tokens they hold
    held_tokens: int = 0  # tokens reserved: prompt, headroom and staging
    held_slots: int = 0
    flows: int = 0  # transfers out of or into this worker now
    fetches: int = 0  # prefixes it may read from others, and give to others, at once; 0 = it does not
    fetching: int = 0  # prefixes it was told to read and has not read yet
    serving: int = 0  # prefixes others were told to read from it
    served: int = 0  # requests ever sent here
    mixed_s: float = 0.0  # seconds of prefill booked beside decoding, decaying; as of `mixed_at`
    mixed_at: float = 0.0

    def queue_s(self, now: float, due: float = math.inf, pause_s: float = 0.0) -> float:
        """Predicted seconds until a prompt due then is next here; without one, until everything accepted is prefilled.
        The one that runs counts less as it ages, but never as over: it is late, not done. And what is late by some time
        is expected to take as long again, so that a worker that has stopped, or knows less than it says, is avoided
        before any timer of ours runs out. pause_s: until one that is due later gives way."""
        if not self.work:
            return 0.0
        head = self.work.get(self.head) if self.head is not None else None
        if head is None:
            head = next(iter(self.work.values()))
        ran = now - self.head_since + head.done_s
        left = max(head.seconds - ran, 0.1 * head.seconds, ran - head.seconds)
        if head.order[0] > due:
            left = min(left, pause_s)
        for work in self.work.values():
            if work is not head and work.order[0] <= due:
                left += work.left_s
        return left

    def passed(self, due: float) -> int:
        """Prompts here that one due then would pass."""
        return sum(work.order[0] > due for work in self.work.values())

    def begin(self, key: Key, work: Work, now: float) -> None:
        """One more prompt is here. If it is due before the one that runs, that waits."""
        running = self.work.get(self.head) if self.head is not None else None
        self.work[key] = work
        if running is None or work.order < running.order:
            if running is not None:
                running.done_s += max(now - self.head_since, 0.0)
            self.head, self.head_since = key, now

    def end(self, key: Key, now: float) -> Work:
        """It is prefilled, or gone."""
        work = self.work.pop(key)
        if key == self.head:
            self.head = min(self.work, key=lambda other: self.work[other].order, default=None)
        self.head_since = max(now, self.head_since)
        return work

    def mixed_share(self, now: float, window_s: float) -> float:
        """Share of the last `window_s` spent on prompts beside decoding."""
        if not self.mixed_s:
            return 0.0
        return self.mixed_s * math.exp((self.mixed_at - now) / window_s) / window_s

    def mix(self, seconds: float, now: float, window_s: float = 5.0) -> None:
        """Book `seconds` of prefill on a decode worker."""
        self.mixed_s = self.mixed_share(now, window_s) * window_s + seconds
        self.mixed_at = now

    def room_tokens(self) -> int:
        """Tokens that can still be reserved."""
        return self.kv_tokens - self.held_tokens if self.kv_tokens else 1 << 40

    def reserved(self) -> float:
        """Share (0..1) of its tokens, or of its places for those that decode: whichever is nearer its end."""
        tokens = self.held_tokens / self.kv_tokens if self.kv_tokens else 0.0
        places = self.decoding / self.max_batch if self.max_batch else 0.0
        return min(max(tokens, places), 1.0)


@dataclass(frozen=True, slots=True)
class RequestView:
    """expected_output: an estimate. ttft_goal_s and tpot_goal_s: the objective; 0 = none. hits: bit -> hit. due: what
    the workers are told, who run what is due first; inf = they are not told, and it is behind all others. behind:
    requests that wait in the router's line behind this one."""

    request_id: str
    tokens: int
    arrived: float
    expected_output: float = 256.0
    hits: dict[int, Hit] = field(default_factory=dict)
    expected_hits: dict[int, Hit] = field(default_factory=dict)
    keys: Keys | None = None
    ttft_goal_s: float = 0.0
    tpot_goal_s: float = 0.0
    session: str = ""
    waited_s: float = 0.0
    due: float = math.inf
    behind: int = 0

    def hit(self, worker: WorkerView) -> Hit:
        return self.hits.get(worker.bit, NO_HIT)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted seconds, by part; what the operator is shown beside what was observed. step_s: of the decode steps that
    the prompt's chunks share, 0 = none. said_tokens: what its worker was said to have of it, 0 = does not matter.
    passing_s: what lies between the worker's seconds and this router's, whichever worker it is."""

    queue_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    admit_s: float = 0.0
    tpot_s: float = 0.0
    cached_tokens: int = 0
    fetch_s: float = 0.0
    step_s: float = 0.0
    said_tokens: int = 0
    passing_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """A prefix is fetched while the prompt waits."""
        return max(self.queue_s, self.fetch_s) + self.load_s + self.prefill_s + self.passing_s


NO_FORECAST = Forecast()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the prompt's first `tokens` tokens from this worker first, which is predicted to take `seconds`. budget_s:
    after this long computing them would have been sooner. lifted: bytes that the worker reads from its disk for it."""

    source: str
    tokens: int
    seconds: float
    budget_s: float = 0.0
    lifted: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Send it there. prefill == decode: both on one worker, nothing is transferred (`local`). fetch: a prefix to bring
    to the worker that prefills."""

    prefill: str
    decode: str
    forecast: Forecast = Forecast()
    cost: float = 0.0
    fetch: Fetch | None = None

    @property
    def local(self) -> bool:
        return self.prefill == self.decode


@dataclass(frozen=True, slots=True)
class Wait:
    """Better to wait than to be placed now: look again when something changes, at the latest after `seconds`."""

    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Nobody:
    """No worker can ever take it as the fleet is; `reason` as in `runtime.errors` ("no_prefill_worker")."""

    reason: str


Decision = Placement | Wait | Nobody


def split(workers: Sequence[WorkerView], need: int) -> tuple[list[WorkerView], list[WorkerView]]:
    """The filter every policy begins with: usable workers whose context holds `need` tokens, by what they may do."""
    fit = [worker for worker in workers if worker.usable and worker.max_model_len >= need]
    prefills = [worker for worker in fit if worker.role is not Role.DECODE]
    decodes = [worker for worker in fit if worker.role is not Role.PREFILL]
    return prefills, decodes
