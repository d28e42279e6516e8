"""Which worker should change its role, and when: decided purely, from plain state and a clock.

    hot pool + cold pool -> one worker moves over          both hot -> one worker more, where Ray may be asked
    the load has gone    -> back to the configured counts  both cold for long -> one worker less

step() looks at the fleet and returns the one thing to do now; the controller does it and looks again. Nothing is
remembered that the registry does not know, but for clocks: a controller that dies leaves the fleet as it is, and the
next one goes on from what it sees.

What keeps it calm: two thresholds over a smoothed pressure, which must last; a pause after every change; a worker keeps
a new role for a while; a change that would push the giver over is not made; one that proves wrong is taken back, and
the same is then asked for longer. Never two changes at once, never below the minimum of a role, and nothing at all
while somebody else drains a worker or most of a pool is silent.

A move between prefill and decode takes work away from what runs, so the worker is drained first. `both` adds a role or
gives one up without that: what runs goes on, whatever is advertised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from deploy.elastic_state import POOLS, Action, Add, Drain, Gauge, Member, Nothing, Pool, Remove, Rules, SetRole, View
from runtime.config import RoleName

HOMEWARD: tuple[RoleName, ...] = ("both", "prefill", "decode")
"""`both` is left without a drain, so nobody else is taken before."""

GAP_S = 5.0
"""Looks further apart than this do not show that a pressure has lasted."""

KEEP = 2.0  # cooldowns a worker keeps a new role, and within which a move may be taken back
CALM = 3.0  # dwells a pool must be cold before the configured counts are restored
IDLE = 6.0  # dwells before a worker is given up
STUBBORN = 8.0  # how much longer a need that proved wrong must last, at most
FORGIVE = 20.0  # cooldowns after which that is forgotten
ORPHAN_S = 30.0
"""A worker that drains this long after `drain_s` and still lives was forgotten by whoever drained it."""
REMOVAL_S = 30.0


# --- what is in progress


@dataclass(slots=True)
class Move:
    """One worker on its way: `to` a role, or away (None). left: what it still holds, None = not drained yet."""

    worker: str
    epoch: int
    was: RoleName
    to: RoleName | None
    since: float
    needy: Pool | None = None
    left: int | None = None
    undo: bool = False  # only the drain is taken back
    undo_sent: bool = False
    removed_at: float | None = None

    @property
    def drains(self) -> bool:
        return self.undo or self.to is None or "both" not in (self.was, self.to)


@dataclass(frozen=True, slots=True)
class Done:
    """The last move that was carried out, for taking it back."""

    worker: str
    was: RoleName
    needy: Pool
    at: float


class Elastic:
    """The controller's memory and its rules. step() decides; drained(), added() and refused() tell what came of it."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.move: Move | None = None
        self.asked: dict[str, tuple[Pool, float]] = {}  # workers asked for and not there yet
        self._gauges: dict[Pool, Gauge] = {pool: Gauge() for pool in POOLS}
        self._looked_at: float | None = None
        self._fleet: frozenset[tuple[str, int, RoleName]] = frozenset()
        self._rest_until = 0.0
        self._changed: dict[str, float] = {}  # worker -> when its role changed
        self._avoid: dict[str, tuple[float, float]] = {}  # worker or "+pool" -> (until, next pause)
        self._drains: dict[str, float] = {}  # draining workers that are not ours -> since
        self._last: Done | None = None
        self._stubborn: dict[Pool, tuple[float, float]] = {}  # (factor, since)

    def smoothed(self, pool: Pool) -> float:
        return self._gauges[pool].value or 0.0

    # --- one look

    def step(self, now: float, view: View) -> Action:
        self._feed(now, view)
        self._arrived(now, view)
        if self.move is not None:
            return self._advance(self.move, now, view)
        if orphan := self._orphan(now, view):
            return Drain(orphan, on=False)
        if late := self._late(now):
            return Remove(late)
        if self._drains:
            return Nothing(f"somebody drains {min(self._drains)}")
        for pool in POOLS:
            serving = view.serving(pool)
            if sum(one.fresh for one in serving) * 2 < len(serving):
                return Nothing(f"most {pool} workers are silent")
        if now < self._rest_until:
            return self._take_back(now, view) or Nothing("resting after a change")
        return self._choose(now, view)

    def _feed(self, now: float, view: View) -> None:
        gap = self._looked_at is not None and now - self._looked_at > GAP_S
        elapsed = 0.0 if self._looked_at is None else now - self._looked_at
        fleet = frozenset((one.name, one.epoch, one.role) for one in view.members if one.usable)
        other = fleet != self._fleet
        self._looked_at, self._fleet = now, fleet
        for pool, gauge in self._gauges.items():
            if gap or other:
                gauge.forget()
            gauge.feed(view.pressure(pool), now, elapsed, self.rules)

    def _arrived(self, now: float, view: View) -> None:
        """Workers that were asked for, and drains of others."""
        for name in [name for name in self.asked if (one := view.member(name)) is not None and one.ready]:
            del self.asked[name]
        ours = self.move.worker if self.move is not None else ""
        seen = {one.name for one in view.members if one.draining and one.name != ours}
        self._drains = {name: self._drains.get(name, now) for name in seen}

    def _orphan(self, now: float, view: View) -> str:
        for name, since in self._drains.items():
            one = view.member(name)
            if one is not None and one.ready and one.fresh and now - since > self.rules.drain_s + ORPHAN_S:
                self._drains[name] = now  # not again at once
                return name
        return ""

    def _late(self, now: float) -> str:
        for name, (pool, since) in list(self.asked.items()):
            if now - since > self.rules.start_s:
                del self.asked[name]
                self._put_off(f"+{pool}", now)
                return name
        return ""

    # --- choosing

    def _choose(self, now: float, view: View) -> Action:
        if (undo := self._take_back(now, view)) is not None:
            return undo
        needy: list[Pool] = [pool for pool in POOLS if self._needs(pool, now)]
        for pool in sorted(needy, key=lambda pool: -self.smoothed(pool)):
            action = self._help(pool, now, view)
            if action is not None:
                return action
        if any(gauge.hot_since is not None for gauge in self._gauges.values()):
            return Nothing("a pool is hot, not for long enough or beyond help")
        return self._go_home(now, view) or self._shrink(now, view) or Nothing("calm")

    def _needs(self, pool: Pool, now: float) -> bool:
        factor, since = self._stubborn.get(pool, (1.0, 0.0))
        if now - since > FORGIVE * self.rules.cooldown_s:
            factor = 1.0
        return self._gauges[pool].hot_for(now) >= self.rules.dwell_s * factor

    def _help(self, needy: Pool, now: float, view: View) -> Action | None:
        """A worker of the other pool where it can spare one, else one more."""
        other = _other(needy)
        if self._gauges[other].cold_for(now) >= self.rules.dwell_s and self._has_room(needy, view):
            movers = self._movers(other, now, view)
            pure = [one for one in movers if one.role == other]
            if self._spares(other, view):
                for candidates in (pure, [one for one in movers if one.role == "both"]):
                    if candidates:
                        return self._begin(_least_busy(candidates), needy, now, view, needy)
            elif pure:
                return self._begin(_least_busy(pure), "both", now, view, needy)
        most, here = self.rules.bounds[needy].most, [one for one in view.members if one.serves(needy)]
        if most > len(here) and not self.asked and self._may(f"+{needy}", now):
            self._rest(now)
            return Add(needy)
        return None

    def _has_room(self, pool: Pool, view: View) -> bool:
        """Another member is within its bound; asked ones count."""
        most = self.rules.bounds[pool].most
        members = sum(one.serves(pool) for one in view.members)
        return not most or members + sum(asked == pool for asked, _ in self.asked.values()) < most

    def _spares(self, pool: Pool, view: View) -> bool:
        """The pool can do with one worker less: its minimum stays, and the rest do not get hot by it."""
        count = len(view.serving(pool))
        if count - 1 < max(self.rules.bounds[pool].least, 1):
            return False
        return self.smoothed(pool) * count / (count - 1) <= self.rules.middle

    def _movers(self, pool: Pool, now: float, view: View) -> list[Member]:
        keep_s = KEEP * self.rules.cooldown_s
        return [
            one
            for one in view.serving(pool)
            if one.fresh and self._may(one.name, now) and now - self._changed.get(one.name, -math.inf) >= keep_s
        ]

    def _regretted(self, now: float) -> bool:
        """The last move was wrong: the pool that gave is hot now, and the one that got has no need."""
        last = self._last
        if last is None or now - last.at > KEEP * self.rules.cooldown_s:
            return False
        giver = self._gauges[_other(last.needy)]
        return giver.hot_for(now) >= self.rules.dwell_s and self.smoothed(last.needy) < self.rules.high

    def _take_back(self, now: float, view: View) -> Action | None:
        last = self._last
        if last is None or not self._regretted(now):
            return None
        self._last = None
        one = view.member(last.worker)
        if one is None or not one.usable or one.role == last.was or not self._may(one.name, now):
            return None
        if last.was != "both" and not self._others_serve(last.needy, one.name, view):
            return None
        factor, _ = self._stubborn.get(last.needy, (1.0, 0.0))
        self._stubborn[last.needy] = (min(factor * 2, STUBBORN), now)
        return self._begin(one, last.was, now, view, None)

    def _go_home(self, now: float, view: View) -> Action | None:
        """Back towards the configured counts, one worker at a time, when whoever loses one has long been cold."""
        over = {role: sum(one.role == role for one in view.members) - self.rules.home.get(role, 0) for role in HOMEWARD}
        surplus = [role for role, count in over.items() if count > 0]
        deficit = [role for role, count in over.items() if count < 0]
        for role in surplus[:1]:
            for to in deficit:
                weaker = [pool for pool in POOLS if role in (pool, "both") and to != pool]
                calm = all(
                    self._gauges[pool].cold_for(now) >= CALM * self.rules.dwell_s
                    and (to == "both" or self._spares(pool, view))
                    for pool in weaker
                )
                gains = [pool for pool in POOLS if to in (pool, "both") and role not in (pool, "both")]
                movers = [
                    one for one in self._movers_of(role, now, view) if all(self._has_room(p, view) for p in gains)
                ]
                if calm and movers:
                    named = [one for one in movers if one.name.startswith(to)]
                    return self._begin(_least_busy(named or movers), to, now, view, None)
        return None

    def _movers_of(self, role: RoleName, now: float, view: View) -> list[Member]:
        pool: Pool = "decode" if role == "decode" else "prefill"
        return [one for one in self._movers(pool, now, view) if one.role == role]

    def _shrink(self, now: float, view: View) -> Action | None:
        for pool in POOLS:
            idle = self._gauges[pool].cold_for(now) >= IDLE * self.rules.dwell_s
            if not self.rules.bounds[pool].most or not idle or self.asked or not self._spares(pool, view):
                continue
            pure = [one for one in self._movers(pool, now, view) if one.role == pool]
            if pure:
                return self._begin(max(pure, key=lambda one: (-one.load, _age(one.name))), None, now, view, None)
        return None

    # --- carrying it out

    def _begin(self, one: Member, to: RoleName | None, now: float, view: View, needy: Pool | None) -> Action:
        self.move = Move(one.name, one.epoch, one.role, to, now, needy)
        return self._advance(self.move, now, view)

    def _advance(self, move: Move, now: float, view: View) -> Action:
        one = view.member(move.worker)
        if one is None or one.epoch != move.epoch:
            return self._end(now, f"{move.worker} has gone")
        if move.undo:
            return self._call_off(move, one, now)
        if one.role == move.to and not one.draining:
            return self._end(now, f"{one.name} is {move.to} now", done=True)
        if one.role == move.to:
            return Drain(one.name, on=False)
        if not self._still_right(move, view):
            return self._call_off(move, one, now)
        if move.drains and (move.left is None or (move.left and now - move.since < self.rules.drain_s)):
            return Drain(one.name, on=True)
        if move.to is not None:
            return SetRole(one.name, move.to)
        return self._give_up(move, now)

    def _call_off(self, move: Move, one: Member, now: float) -> Action:
        """Put it back, once even if its record says that it does not drain: what failed may have arrived."""
        if move.undo_sent and not one.draining:
            return self._end(now, f"{one.name} stays as it is")
        move.undo = move.undo_sent = True
        return Drain(one.name, on=False)

    def _give_up(self, move: Move, now: float) -> Action:
        if move.removed_at is None:
            move.removed_at = now
            return Remove(move.worker)
        if now - move.removed_at > REMOVAL_S:
            self.refused(move.worker, now)
        return Nothing(f"{move.worker} is ending")

    def _still_right(self, move: Move, view: View) -> bool:
        """Whoever is left can do what this worker gives up."""
        pools = [pool for pool in POOLS if move.was in (pool, "both") and move.to not in (pool, "both")]
        return move.removed_at is not None or all(self._others_serve(pool, move.worker, view) for pool in pools)

    def _others_serve(self, pool: Pool, name: str, view: View) -> bool:
        others = sum(one.name != name for one in view.serving(pool))
        return others >= max(self.rules.bounds[pool].least, 1)

    def _end(self, now: float, why: str, *, done: bool = False) -> Nothing:
        move, self.move = self.move, None
        assert move is not None
        self._rest(now)
        if done and move.to is not None:
            self._changed[move.worker] = now
            self._last = Done(move.worker, move.was, move.needy, now) if move.needy is not None else None
        return Nothing(why)

    def _rest(self, now: float) -> None:
        self._rest_until = now + self.rules.cooldown_s

    # --- what came of it

    def drained(self, worker: str, left: int) -> None:
        """The answer to Drain(on): what the worker still holds, requests and hand-offs."""
        if self.move is not None and self.move.worker == worker:
            self.move.left = left

    def added(self, name: str, pool: Pool, now: float) -> None:
        """Ray was asked for this worker."""
        self.asked[name] = (pool, now)

    def refused(self, what: str, now: float) -> None:
        """An action failed; what: the worker, or "+" and the pool that was to grow. It is left alone for a while."""
        self._put_off(what, now)
        move = self.move
        if move is None or move.worker != what:
            return
        if move.undo or not move.drains:  # even that failed: what stays drained is put back as an orphan
            self._end(now, "")
        else:
            move.undo = True

    def _put_off(self, what: str, now: float) -> None:
        _, pause = self._avoid.get(what, (0.0, KEEP * self.rules.cooldown_s))
        self._avoid[what] = (now + pause, min(2 * pause, 16 * KEEP * self.rules.cooldown_s))

    def _may(self, what: str, now: float) -> bool:
        return now >= self._avoid.get(what, (0.0, 0.0))[0]


def _other(pool: Pool) -> Pool:
    return "decode" if pool == "prefill" else "prefill"


def _least_busy(members: Iterable[Member]) -> Member:
    return min(members, key=lambda one: (one.load, one.name))


def _age(name: str) -> tuple[int, str]:
    """Workers that were added last have the highest numbers."""
    number = name.rpartition("-")[2]
    return (int(number) if number.isdigit() else 0, name)
