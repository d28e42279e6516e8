"""When a hot prefix is worth computing once more: rent or buy.

The failure that shapes it: everybody who wants a cached prefix waits for its holder as long as that is a little sooner
than computing it anew. Each is right for itself, and together they queue at one or two holders beside idle workers for
as long as the crowd lasts: a second copy would help those who come next, and nobody makes it.

So each wait in a holder's queue is rent that the prefix has cost. When what was paid since the last copy reaches the
price of another one, whoever comes next buys it and goes to an idle worker. Without knowing what will come this costs
at most twice what knowing it would (ski rental), and it needs no rate, window or threshold to be chosen.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Paid:
    seconds: float = 0.0
    last: str = ""  # the request that paid last, and how much: it may ask more than once
    by_last: float = 0.0


class Rents:
    """limit: prefixes remembered, those that cost nobody anything for longest forgotten first."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._paid: OrderedDict[bytes, _Paid] = OrderedDict()

    def __len__(self) -> int:
        return len(self._paid)

    def due(self, prefix: bytes, request_id: str, wait_s: float, price_s: float) -> bool:
        """`request_id` would wait `wait_s` for the prefix's holder; another copy costs `price_s`, inf = cannot be had.
        True: buy it now. Then the rent begins anew."""
        paid = self._paid.setdefault(prefix, _Paid())
        self._paid.move_to_end(prefix)
        if paid.last != request_id:
            paid.last, paid.by_last = request_id, 0.0
        paid.seconds += max(wait_s - paid.by_last, 0.0)
        paid.by_last = max(wait_s, paid.by_last)
        if paid.seconds >= price_s:
            del self._paid[prefix]
            return True
        if len(self._paid) > self._limit:
            self._paid.popitem(last=False)
        return False
