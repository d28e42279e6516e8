"""Cross-origin requests: which web pages may read our answers. Nobody's, unless the operator names them.

A browser asks first, without a key (OPTIONS), so the question is answered without one; what it allows is still behind
the key. Answers say the origin back only where it is configured.
"""

from __future__ import annotations

from collections.abc import Mapping

METHODS = "GET, POST, OPTIONS"
HEADERS = "Authorization, Content-Type, X-Request-Id, Traceparent"
EXPOSED = "X-Request-Id, X-Pd-Reason, Retry-After"
MAX_AGE_S = 600


class Cors:
    """origins: comma-separated, "*" = every page, "" = none."""

    def __init__(self, origins: str) -> None:
        self._origins = frozenset(origin.strip() for origin in origins.split(",") if origin.strip())

    def preflight(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of the answer to OPTIONS."""
        answer = {"Allow": METHODS}
        allowed = self.answer(headers)
        if allowed:
            answer |= allowed
            answer["Access-Control-Allow-Methods"] = METHODS
            answer["Access-Control-Allow-Headers"] = HEADERS
            answer["Access-Control-Max-Age"] = str(MAX_AGE_S)
        return answer

    def answer(self, headers: Mapping[str, str]) -> dict[str, str]:
        """What an answer to a request with these headers carries. They are looked up by names in lower case."""
        if not self._origins:
            return {}
        origin = headers.get("origin", "")
        if not origin or not ("*" in self._origins or origin in self._origins):
            return {}
        return {
            "Access-Control-Allow-Origin": "*" if "*" in self._origins else origin,
            "Access-Control-Expose-Headers": EXPOSED,
            "Vary": "Origin",
        }
