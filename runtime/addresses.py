"""What an address says about who can come in. Imports nothing."""

from __future__ import annotations


def is_loopback(host: str) -> bool:
    """Whether only this machine can come in at `host`, as it stands in a listen address."""
    return host.startswith("127.") or host in ("localhost", "[::1]")
