"""What is on its way up for requests that own the room for it: pages and states of a hit, or all of a swapped request.

Engine thread only. Both sides of a copy are held until it is done, whatever becomes of the request meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.pages import PageHold
from engine.tiers.carriers import Pair
from engine.tiers.pool import Mover, Sums
from engine.tiers.stats import Counts
from kvtransfer.types import PAGE_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """pages, slots: (device, host) and their checksums. hold: counts on both sides. base: tokens before `pages`, which
    count one by one as far as they are good; or whole: tokens there are when everything is good, else none.
    spoilt: told how many leading pages and slots were good, when that is not all. kept: a device slot that gets the
    state as well, for the cache; its count goes to who takes Loaded."""

    seq: int
    pages: Sequence[Pair]
    page_sums: Sequence[Sums]
    hold: PageHold
    base: int = 0
    whole: int = 0
    slots: Sequence[Pair] = ()
    slot_sums: Sequence[Sums] = ()
    spoilt: Callable[[int, int], None] = lambda _pages, _slots: None
    kept: int = 0
    hit: bool = True


@dataclass(frozen=True, slots=True)
class Loaded:
    """seq has `computed` tokens in its pages now. None: its pages and state do not go together, it has to begin anew.
    kept: see Loading; the receiver owns a count on it."""

    seq: int
    computed: int | None
    kept: int = 0


Good = tuple[int, int]
"""Leading pages and slots that have arrived and are what they were."""

Submit = Callable[[Callable[[], Good], Callable[[Good | None, Exception | None, float], None]], None]
"""(what to run on the tier's thread, what to do with its result, error and seconds)"""


class Loads:
    """copied: told pages, slots and seconds. give_back: a device slot nobody wants after all."""

    def __init__(
        self,
        mover: Mover,
        counts: Counts,
        submit: Submit,
        copied: Callable[[int, int, float], None],
        give_back: Callable[[int], None],
    ) -> None:
        self._mover, self._counts = mover, counts
        self._submit, self._copied, self._give_back = submit, copied, give_back
        self.under_way: dict[int, Loading] = {}
        self._loaded: list[Loaded] = []

    def start(self, loading: Loading) -> None:
        assert loading.seq not in self.under_way
        self.under_way[loading.seq] = loading

        def run() -> Good:
            slots = self._mover.load(False, loading.slots, loading.slot_sums) if loading.slots else 0
            if slots < len(loading.slots):
                return 0, slots
            return self._mover.load(True, loading.pages, loading.page_sums), slots

        def done(good: Good | None, error: Exception | None, seconds: float) -> None:
            self._concluded(loading, good or (0, 0), error, seconds)

        self._submit(run, done)

    def take(self) -> list[Loaded]:
        """Requests whose load is over, since the last call."""
        loaded, self._loaded = self._loaded, []
        return loaded

    def forget(self, seq: int) -> None:
        """What is on its way for this request lands nowhere."""
        self.under_way.pop(seq, None)
        for loaded in [one for one in self._loaded if one.seq == seq]:
            self._loaded.remove(loaded)
            if loaded.kept:
                self._give_back(loaded.kept)

    def _concluded(self, loading: Loading, good: Good, error: Exception | None, seconds: float) -> None:
        pages, slots = good
        self._copied(pages, slots, seconds)
        whole = pages == len(loading.pages) and slots == len(loading.slots)
        self._counts.failed += error is not None
        self._counts.corrupt += error is None and not whole
        if loading.hit:
            self._counts.hit_pages += pages
            self._counts.hit_states += bool(loading.slots) and whole
        wanted = self.under_way.get(loading.seq) is loading
        if wanted:
            del self.under_way[loading.seq]
        keeps = loading.kept if wanted and whole else 0
        if loading.kept and not keeps:
            self._give_back(loading.kept)
        loading.hold.release()
        if not whole:
            loading.spoilt(pages, slots)
        if wanted:
            self._loaded.append(Loaded(loading.seq, _computed(loading, pages, whole), keeps))


def _computed(loading: Loading, pages: int, whole: bool) -> int | None:
    if not loading.whole:
        return loading.base + pages * PAGE_TOKENS
    if whole:
        return loading.whole
    return None if loading.hit else 0
