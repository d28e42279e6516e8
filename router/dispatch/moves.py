"""Planned moves under way: reserve at the target, ask the source, go on from what it gives. `moving` decides on them.

The failure it answers: a drain that cuts streams, or waits for the longest of them. A move is asked for only when its
target has room booked; the source may take its time, end the request first, or have nothing to give, and each of that
is no failure of the request. What a move left half done is the ordinary continuation's: nothing is lost by trying.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

import structlog

from router.dispatch import moving
from router.dispatch.legs import State
from router.dispatch.moving import Decoder, Need, Seat
from router.dispatch.onward import Onward
from router.dispatch.seats import Shared
from router.policy.pairing import Role
from router.workers.worker import ROLES, Worker
from runtime.errors import PdserveError
from runtime.metrics import Metrics

if TYPE_CHECKING:
    from router.dispatch.passage import Passage

LOOK_S = 0.25
PAUSE_S = 0.05
"""Between two looks, however often the fleet changes."""

ANSWER_S = 10.0
"""The source may have a prompt to finish first; after this the room at the target is given back."""

AGAIN_S = 1.0
"""What could not move is asked again after this."""

TRIES = 3
HANDOVER = "handover"

_log = structlog.get_logger("pdserve.router.moves")


class Move:
    """One choice on its way (seats.Moving). over: told once how it ended."""

    def __init__(self, passage: Passage, choice: int, reason: str, over: Callable[[Move, str], None]) -> None:
        assert passage.decode is not None
        self.passage = passage
        self.choice = choice
        self.reason = reason
        self.source = passage.decode.worker
        self.asked_at = 0.0
        self._over = over
        self._answered = asyncio.Event()
        self._left = False
        piece = passage.owner.onward(passage, choice)
        self.onward = Onward(passage.owner, passage.shared, piece, passage.avoid, self.source, self._ended)
        passage.moves[choice] = self

    async def run(self, targets: Callable[[frozenset[str]], str | None]) -> None:
        """targets: the next worker to ask, given those not to."""
        try:
            await self._run(targets)
        except PdserveError:  # its time is over
            self._give_up("ended")
        except Exception as exc:  # noqa: BLE001  supervises: a bug costs this move, and is heard of
            _log.error("move_failed", request_id=self.onward.piece.request_id, exc_info=exc)
            self._give_up("failed")

    async def _run(self, targets: Callable[[frozenset[str]], str | None]) -> None:
        if not await self._reserve(targets):
            self._give_up("refused")
            return
        leg = self.passage.decode
        if leg is None or leg.worker is not self.source:  # it went on elsewhere by itself
            self._give_up("ended")
            return
        self.asked_at = self.passage.shared.clock.monotonic()
        leg.handover(self.choice)
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._answered.wait()
        except TimeoutError:
            self._give_up("no_answer")

    async def _reserve(self, targets: Callable[[frozenset[str]], str | None]) -> bool:
        for _ in range(TRIES):
            target = targets(self.onward.refused)
            if target is None or self.onward.over or self._left:
                return False
            if await self.onward.reserve(target):
                return True
        return False

    def departed(self) -> Onward:
        """It has left its worker."""
        self._left = True
        self._answered.set()
        return self.onward

    def off(self) -> None:
        """The passage is over, or its worker has failed it."""
        self._give_up("ended")

    def _give_up(self, outcome: str) -> None:
        if self._left:
            return
        if self.passage.moves.get(self.choice) is self:
            del self.passage.moves[self.choice]
        self._answered.set()
        self._ended(outcome)
        self.onward.close("settled")

    def _ended(self, outcome: str) -> None:
        over, self._over = self._over, _nobody
        over(self, outcome)


class Moves:
    """Those of one router. passages(): all that are under way."""

    def __init__(self, shared: Shared, metrics: Metrics, passages: Callable[[], Iterable[Passage]]) -> None:
        self._shared = shared
        self._passages = passages
        self._need = Need(shared.config.moves_pressure_s)
        self._under_way: set[Move] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._not_before: dict[tuple[Passage, int], float] = {}
        self._count = metrics.counter("pdserve_moves", "Planned moves between decode workers", ["reason", "outcome"])
        self._seconds = metrics.histogram(
            "pdserve_move_seconds", "From asking the source until the target has it all", ["reason"]
        )

    def start(self) -> None:
        self._spawn(self._watch())

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- moves ----------------------------------------------------------------------------------------------------

    def move(self, passage: Passage, choice: int, reason: str, target: str | None = None) -> bool:
        """Take a running choice to another decode worker: `target`, or whoever has least to do. False: it does not run,
        or is on its way already."""
        leg = passage.decode
        if leg is None or leg.state is not State.RUNNING or choice in passage.moves or not leg.worker.can(HANDOVER):
            return False
        move = Move(passage, choice, reason, self._over)
        self._under_way.add(move)
        self._spawn(move.run(lambda refused: self._target(move, refused, target)))
        return True

    def _target(self, move: Move, refused: frozenset[str], target: str | None) -> str | None:
        if target is not None:
            return target if target not in refused else None
        shared, piece = self._shared, move.onward.piece
        unable = {worker.id for worker in shared.fleet.workers() if not worker.can(HANDOVER)}
        length = len(piece.tokens) + move.onward.left_to_make
        return shared.booking.another_decode(length, move.source.group, refused | unable)

    def _over(self, move: Move, outcome: str) -> None:
        self._under_way.discard(move)
        self._count.labels(move.reason, outcome).inc()
        now = self._shared.clock.monotonic()
        if outcome == "moved":
            self._seconds.labels(move.reason).observe(now - move.asked_at)
        elif not move.passage.over:
            self._not_before[move.passage, move.choice] = now + AGAIN_S
        target = move.onward.decode.worker.id if move.onward.decode is not None else ""
        _log.info(
            "move",
            request_id=move.onward.piece.request_id,
            reason=move.reason,
            outcome=outcome,
            source=move.source.id,
            target=target,
            tokens=len(move.onward.piece.tokens),
        )

    # --- who moves ------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            change = self._shared.fleet.changed_event()
            try:
                self.look()
            except Exception as exc:  # noqa: BLE001  supervises: a bug stops no later move, and is heard of
                _log.error("look_failed", exc_info=exc)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await change.wait()
            await asyncio.sleep(PAUSE_S)

    def look(self) -> None:
        """Begin what is due."""
        now = self._shared.clock.monotonic()
        workers = [_decoder(worker) for worker in self._shared.fleet.workers()]
        leaving, needy = moving.leaving(workers), self._need.lasting(workers, now)
        if not leaving and not needy:
            self._not_before.clear()
            return
        self._not_before = {key: at for key, at in self._not_before.items() if at > now and not key[0].over}
        seats = self._seats({*leaving, *needy}, now)
        self._empty(leaving, seats)
        if needy and not any(move.reason == "pressure" for move in self._under_way):
            self._relieve(needy, workers, seats, now)

    def _empty(self, leaving: dict[str, str], seats: dict[int, _Sat]) -> None:
        """A few at a time."""
        for passage, choice, seat in seats.values():
            if len(self._under_way) >= self._shared.config.moves_at_once:
                return
            if seat.worker_id in leaving:
                self.move(passage, choice, leaving[seat.worker_id])

    def _relieve(self, needy: list[str], workers: list[Decoder], seats: dict[int, _Sat], now: float) -> None:
        """One."""
        plain = {key: seat for key, (_, _, seat) in seats.items()}
        headroom = self._shared.config.headroom_tokens
        for worker_id in needy:
            for key in moving.longest_silent(plain, worker_id)[:1]:
                passage, choice, seat = seats[key]
                assert passage.decode is not None
                target = moving.roomiest(workers, seat, passage.decode.worker.group, headroom)
                if passage.begun and target is not None and self.move(passage, choice, "pressure", target):
                    self._need.relieved(worker_id, now)
                    return

    def _seats(self, workers: set[str], now: float) -> dict[int, _Sat]:
        """Every choice that runs at one of these and may be asked for."""
        found: dict[int, _Sat] = {}
        for passage in self._passages():
            leg = passage.decode
            if leg is None or leg.state is not State.RUNNING or leg.worker.id not in workers:
                continue
            came = passage.arrived_at if isinstance(passage, Onward) else None
            for choice in passage.owner.open_choices(passage.choices):
                if choice in passage.moves or (passage, choice) in self._not_before:
                    continue
                tokens = passage.piece.prompt_len + passage.owner.next_sequence(choice)
                silent = now - (passage.moved_at if passage.moved_at is not None else now)
                here = now - came if came is not None else float("inf")
                found[len(found)] = (passage, choice, Seat(leg.worker.id, tokens, silent, here))
        return found

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_Sat = tuple["Passage", int, Seat]


def _decoder(worker: Worker) -> Decoder:
    load = worker.load
    return Decoder(
        worker_id=worker.id,
        role=ROLES.get(worker.record.role, Role.BOTH),
        usable=worker.usable,
        draining=worker.record.draining,
        movable=worker.can(HANDOVER),
        decoding=worker.decode.legs if worker.decode is not None else 0,
        group=worker.group,
        pages=load.pages_total,
        pages_free=load.pages_free,
        slots_free=load.slots_free,
        has_slots=worker.has_slots,
        swapped=load.swapped,
        waiting=load.waiting,
    )


def _nobody(move: Move, outcome: str) -> None:
    del move, outcome
