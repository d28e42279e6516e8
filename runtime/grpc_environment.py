"""What gRPC reads from the environment when it is imported, as our processes want it; what is set already stays."""

from __future__ import annotations

SETTINGS = {
    "GRPC_VERBOSITY": "ERROR",  # else it prints ordinary ends of connections
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
}
"""Without the event engine (the default since 2026) the thread that waits for completions reads the sockets itself.
With it a message goes through a pool's thread as well: half as many wake-ups again, and on a busy core each may have to
wait its turn. A short request cost the router 19 switches of threads, and 13 without, and a tenth of its CPU time."""
