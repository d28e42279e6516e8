"""One simulated worker in virtual time: prompts chunk by chunk, decode steps in runs, pools and caches for real.

Prompts are computed chunk by chunk in the order of engine.order: one that is due sooner passes another between two of
its chunks. Three kinds of steps, as a real engine has them: a prompt's chunk alone, a decode step alone, both in one. A
mixed step takes the chunk's time plus the decode step's, stretched by `mixed.decode_slowdown_per_prefill_token` for
each prefill token in it: everybody who decodes there waits for the chunk. Decode steps between events are one event.

Pages for prompt and answer are taken at once, or the request waits in order, as the engine's all-or-nothing allocation.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.sim.agenda import Agenda
from bench.sim.noise import Reader
from bench.sim.profile import Profile
from bench.sim.store import Store

LONGEST_RUN = 4096


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through a pair. Times are of the virtual clock; -1 = not yet. due: what its router tells
    the workers; of one that says nothing all are equal, and served as they come."""

    number: int
    tokens: int
    output: int
    keys: list[bytes]
    arrived: float
    due: float = 0.0
    # what happened
    cached: int = 0
    source_queued: float = -1.0
    source_began: float = -1.0
    first_chunk: float = -1.0
    first: float = -1.0
    admitted: float = -1.0
    last: float = -1.0
    held: int = 0  # units of the prompt the decode worker had
    source_pages: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A worker's report of one prompt, by its own clock."""

    cached: int
    queue_s: float
    load_s: float
    load_bytes: float
    prefill_s: float
    step_s: float  # of the decode steps it shared, 0 = none


class Listener(Protocol):
    """Whoever sent the job. Called at the moment it happens."""

    def prefilled(self, worker: Worker, job: Job, report: Prefilled) -> None: ...
    def admitted(self, worker: Worker, job: Job) -> None: ...
    def finished(self, worker: Worker, job: Job) -> None: ...
    def stepped(self, worker: Worker, batch: float, context: float, seconds: float) -> None: ...


@dataclass(slots=True, eq=False)
class _Prompt:
    job: Job
    local: bool
    position: int = 0
    order: tuple[float, int] = (0.0, 0)
    chunks: list[tuple[int, float]] = field(default_factory=list)  # (tokens, seconds) of those planned and not run
    load_s: float = 0.0
    load_bytes: float = 0.0
    spent: float = 0.0
    step_s: float = 0.0


class Worker:
    """index: place in the fabric. decodes: whether requests may join it (else a prompt is one event)."""

    def __init__(
        self,
        name: str,
        index: int,
        profile: Profile,
        store: Store,
        reader: Reader,
        agenda: Agenda,
        listener: Listener,
        *,
        decodes: bool,
        speed: float,
        drift: float,
    ) -> None:
        self.name = name
        self.index = index
        self.store = store
        self.busy_prefill_s = 0.0
        self.busy_decode_s = 0.0
        self._profile = profile
        self._reader = reader
        self._agenda = agenda
        self._listener = listener
        self._decodes = decodes
        self._speed = speed
        self._drift = 1.0 + drift
        self._prompts: list[tuple[tuple[float, int], _Prompt]] = []  # not begun
        self._passed: list[tuple[tuple[float, int], _Prompt]] = []  # begun, and passed by one that was due sooner
        self._order = 0
        self._current: _Prompt | None = None
        self._alone: tuple[float, int, int] | None = None  # of chunks that run in one go: began, how many, version
        self._landing: deque[Job] = deque()
        self._joining: deque[Job] = deque()
        self._running: list[tuple[int, int, Job]] = []
        self._context = 0
        self._steps = 0
        self._busy = False
        self._run: tuple[float, int, int, int, float, float] | None = None  # began, steps, place, version, base, slope
        self._version = 0

    # --- what the sender asks -----------------------------------------------------------------------------------

    def noise(self) -> float:
        """The factor of one thing it does beside its steps (a transfer)."""
        return self._reader.next()

    def submit(self, job: Job, *, local: bool) -> None:
        """Run its prompt; local: and then decode here."""
        self._order += 1
        job.source_queued = self._agenda.now
        prompt = _Prompt(job, local, order=(job.due, self._order))
        heapq.heappush(self._prompts, (prompt.order, prompt))
        self._poke()

    def expect(self, job: Job) -> None:
        """Its pages will come from elsewhere: find room. Listener.admitted() says when there is."""
        self._landing.append(job)
        self._poke()

    def arrived(self, job: Job) -> None:
        """Its pages are here: decode."""
        self.store.publish(job.keys, job.pages)
        self._joining.append(job)
        self._poke()

    def take_prefix(self, keys: Sequence[bytes], units: int) -> bool:
        """A prefix has come from another worker. False: there is no room for it."""
        taken = self.store.adopt(keys, units)
        self._poke()
        return taken

    def let_go(self, pages: Sequence[int]) -> None:
        """Another worker has read these."""
        self.store.release(pages)
        self._poke()

    def release_source(self, job: Job) -> None:
        """The hand-off was read: its pages stay as cache only."""
        self.store.release(job.source_pages)
        job.source_pages = []
        self.store.give_slot()
        self._poke()

    def drop_expected(self, job: Job) -> None:
        """The answer ended with its first token."""
        if job.pages:
            self.store.release(job.pages)
            job.pages = []
            self.store.give_slot()
        else:
            self._landing.remove(job)
        self._poke()

    # --- turns --------------------------------------------------------------------------------------------------

    def _poke(self) -> None:
        """Something changed. In the middle of a run of decode steps: go on after the step that runs now."""
        if not self._busy:
            self._turn()
        elif self._alone is not None:
            self._give_way()
        elif self._run is not None:
            began, steps, place, _, base, slope = self._run
            elapsed = self._agenda.now - began
            low, high = 1, steps
            while low < high:
                middle = (low + high) // 2
                if self._reader.seconds(place, middle, base, slope) >= elapsed:
                    high = middle
                else:
                    low = middle + 1
            if low < steps:
                self._version += 1
                self._run = (began, low, place, self._version, base, slope)
                end = began + self._reader.seconds(place, low, base, slope)
                self._agenda.at(end, self._run_over, self._version)

    def _turn(self) -> None:
        """Start the next step. Busy meanwhile, so that what a listener does in answer waits for the turn's end."""
        self._busy = True
        self._admit()
        self._join()
        self._next_prompt()
        if self._current is not None:
            self._chunk(self._current)
        elif self._running:
            self._decode_run()
        else:
            self._busy = False

    def _admit(self) -> None:
        while self._landing:
            job = self._landing[0]
            pages = self._room(job, job.tokens + job.output)
            if pages is None:
                return
            self._landing.popleft()
            job.pages, job.held = pages
            job.admitted = self._agenda.now
            self._listener.admitted(self, job)

    def _room(self, job: Job, tokens: int) -> tuple[list[int], int] | None:
        """Pages for all of it and a slot, or nothing. Also how many units were there already."""
        shared = self.store.cache.match(job.keys)
        pages = self.store.allocate(shared, tokens)
        if pages is None:
            return None
        if not self.store.take_slot():
            self.store.release(pages)
            return None
        return pages, len(shared)

    def _join(self) -> None:
        while self._joining and len(self._running) < self._profile.pool.max_batch:
            job = self._joining.popleft()
            heapq.heappush(self._running, (self._steps + job.output - 1, job.number, job))
            self._context += job.tokens + 1

    def _next_prompt(self) -> None:
        """The one due first, of those begun and the first of those that wait, if there is room for it."""
        if self._passed and (self._current is None or self._passed[0][0] < self._current.order):
            self._pass(heapq.heappop(self._passed)[1])
        if self._prompts and (self._current is None or self._prompts[0][0] < self._current.order):
            prompt = self._prompts[0][1]
            if self._begin(prompt):
                heapq.heappop(self._prompts)
                self._pass(prompt)

    def _pass(self, prompt: _Prompt) -> None:
        """It is computed next."""
        if self._current is not None:
            heapq.heappush(self._passed, (self._current.order, self._current))
        self._current = prompt

    def _begin(self, prompt: _Prompt) -> bool:
        """Find room. False: there is none."""
        job = prompt.job
        found = self.store.find(job.keys, job.tokens)
        tokens = job.tokens + (job.output if prompt.local else 0)
        pages = self.store.allocate(found.pages, tokens)
        if pages is None:
            return False
        if not self.store.take_slot():
            self.store.release(pages)
            return False
        if prompt.local:
            job.pages = pages
        else:
            job.source_pages = pages
        job.cached = prompt.position = found.resume
        job.source_began = self._agenda.now
        self._load(prompt, found.host, found.disk, found.state_from_host)
        return True

    def _load(self, prompt: _Prompt, host: int, disk: int, state: bool) -> None:
        """What is promoted before the first chunk."""
        terms, unit_bytes = self._profile.tiers, self.store.unit * self._profile.model.kv_bytes_per_token
        for count, speed in ((host, terms.host_Bps), (disk, terms.disk_Bps)):
            if count:
                prompt.load_s += (terms.setup_s + count * unit_bytes / speed) * self._reader.next()
                prompt.load_bytes += count * unit_bytes
        if state:
            prompt.load_s += terms.setup_s + self._profile.model.state_bytes / terms.host_Bps
            prompt.load_bytes += self._profile.model.state_bytes

    # --- prefill steps ------------------------------------------------------------------------------------------

    def _chunk(self, prompt: _Prompt) -> None:
        """One chunk, or all of them on a worker that nobody joins: until somebody is due sooner."""
        if not prompt.chunks:
            self._plan(prompt)
        now, seconds = self._agenda.now, sum(took for _, took in prompt.chunks)
        if prompt.job.first_chunk < 0:
            prompt.job.first_chunk = now + prompt.chunks[0][1]
        if self._decodes:
            ((done, _),), prompt.chunks = prompt.chunks, []
            decode = self._mixed(done)
            self._took(prompt, seconds, decode)
            self._agenda.at(now + seconds + decode, self._chunk_over, prompt, done, len(self._running))
            return
        self._stop_alone(now, len(prompt.chunks), now + seconds)

    def _stop_alone(self, began: float, count: int, end: float) -> None:
        self._version += 1
        self._alone = (began, count, self._version)
        self._agenda.at(end, self._alone_over, self._version)

    def _plan(self, prompt: _Prompt) -> None:
        """What its next chunks take: of all, where nothing else happens between them."""
        terms, job = self._profile.prefill, prompt.job
        extra = prompt.load_s + terms.fixed_s * self._speed if prompt.position == job.cached else 0.0
        at = prompt.position
        while at < job.tokens:
            size = min(terms.chunk_tokens, job.tokens - at)
            took = extra + self._profile.prefill_s(at, size) * self._speed * self._reader.next()
            prompt.chunks.append((size, took))
            extra, at = 0.0, at + size
            if self._decodes:
                break

    def _took(self, prompt: _Prompt, seconds: float, decode: float = 0.0) -> None:
        prompt.spent += seconds + decode
        self.busy_prefill_s += seconds
        self.busy_decode_s += decode

    def _give_way(self) -> None:
        """Chunks run in one go, and something has come: if it is due sooner, they stop behind the one that runs now."""
        assert self._alone is not None
        assert self._current is not None
        if not self._prompts or self._prompts[0][0] > self._current.order:
            return
        began, count, _ = self._alone
        end = began
        for place, (_, took) in enumerate(self._current.chunks[: count - 1]):
            end += took
            if end >= self._agenda.now:
                self._stop_alone(began, place + 1, end)
                return

    def _alone_over(self, version: int) -> None:
        if self._alone is None or self._alone[2] != version:
            return
        count, prompt = self._alone[1], self._current
        assert prompt is not None
        self._alone = None
        ran, prompt.chunks = prompt.chunks[:count], prompt.chunks[count:]
        self._took(prompt, sum(took for _, took in ran))
        self._chunk_over(prompt, sum(size for size, _ in ran), 0)

    def _mixed(self, tokens: int) -> float:
        """The decode step that rides along."""
        if not self._running:
            return 0.0
        base = self._profile.step_s(len(self._running), self._context) * self._speed
        if self._current is not None:
            self._current.step_s = max(self._current.step_s, base)
        stretch = 1.0 + self._profile.mixed.decode_slowdown_per_prefill_token * tokens
        return base * stretch * self._reader.next()

    def _chunk_over(self, prompt: _Prompt, done: int, batch: int) -> None:
        prompt.position += done
        if batch:
            self._advance(1)
        if prompt.position >= prompt.job.tokens:
            self._prompt_over(prompt)
        self._turn()

    def _prompt_over(self, prompt: _Prompt) -> None:
        job = prompt.job
        self._current = None
        job.first = self._agenda.now
        self.store.publish(job.keys, job.pages if prompt.local else job.source_pages)
        self.store.checkpoint(job.keys, job.cached, job.tokens)
        report = Prefilled(
            job.cached,
            (self._agenda.now - job.source_queued - prompt.spent) * self._drift,
            prompt.load_s * self._drift,
            prompt.load_bytes,
            (prompt.spent - prompt.load_s) * self._drift,
            prompt.step_s,
        )
        if prompt.local and job.output > 1:
            self._joining.append(job)
        self._listener.prefilled(self, job, report)
        if prompt.local and job.output == 1:
            self._over(job)

    # --- decode steps -------------------------------------------------------------------------------------------

    def _decode_run(self) -> None:
        """Steps until the next answer ends; an arrival cuts it short at a step's end."""
        batch = len(self._running)
        steps = max(min(self._running[0][0] - self._steps, LONGEST_RUN), 1)
        base = self._profile.step_s(batch, self._context) * self._speed
        slope = self._profile.decode.per_context_token_s * batch * self._speed
        place = self._reader.run(steps)
        self._version += 1
        self._run = (self._agenda.now, steps, place, self._version, base, slope)
        end = self._agenda.now + self._reader.seconds(place, steps, base, slope)
        self._agenda.at(end, self._run_over, self._version)

    def _run_over(self, version: int) -> None:
        if self._run is None or version != self._version:
            return
        began, steps, _, _, _, _ = self._run
        self._run = None
        self._reader.used(steps)
        batch, seconds = len(self._running), self._agenda.now - began
        self.busy_decode_s += seconds
        context = self._context + 0.5 * batch * (steps - 1)
        self._advance(steps)
        self._listener.stepped(self, batch, context, seconds / steps * self._drift)
        self._turn()

    def _advance(self, steps: int) -> None:
        self._steps += steps
        self._context += steps * len(self._running)
        while self._running and self._running[0][0] <= self._steps:
            _, _, job = heapq.heappop(self._running)
            self._context -= job.tokens + job.output
            self._over(job)

    def _over(self, job: Job) -> None:
        job.last = self._agenda.now
        self.store.release(job.pages)
        job.pages = []
        self.store.give_slot()
        self._listener.finished(self, job)

    def check_idle(self) -> None:
        """Assert that nothing is left behind. Raises AssertionError."""
        self.store.check()
        assert not self._prompts
        assert not self._passed
        assert self._current is None
        assert not any((self._landing, self._joining, self._running)), "a request was left behind"
        assert self.store.pool.referenced == 0, "pages nobody holds"
        assert self.store.slots_held == 0
        assert self._context == 0
