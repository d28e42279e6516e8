"""Which keys of the configuration concern which process, and what they are about: what a command's help lists. Every
process takes every key (one file configures them all) and reads those here; a test compares that with the sources."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from runtime.config import Config

Process = Literal["router", "worker", "controller", "cluster"]

SECTIONS: dict[str, tuple[str, tuple[Process, ...]]] = {
    "model": ("The model", ("worker",)),
    "role": ("One worker", ("worker",)),
    "host_pool_bytes": ("Host tier", ("worker",)),
    "sim": ("Simulated workers", ("worker",)),
    "lease_s": ("Hand-off", ("worker",)),
    "http_listen": ("The router", ("router",)),
    "registry": ("Registry and control", ("router", "worker", "controller")),
    "elastic": ("Elastic roles", ("controller",)),
    "tls_cert": ("TLS for our own sockets: all three or none", ("router", "worker", "controller")),
    "prefill": ("The cluster", ("cluster",)),
}
"""The first key of each section of Config -> its title, and who reads what is in it."""

_ALSO: dict[Process, Iterable[str]] = {
    "router": (
        "model", "served_model_name", "max_model_len", "chunk_tokens", "headroom_tokens", "prefix_fetches",
        "reattach_s",
    ),
    "worker": ("max_n", "max_top_logprobs", "max_logit_bias"),
    "controller": (
        "max_batch", "ttft_goal_s", "ttft_goal_s_per_1k", "tpot_goal_s", "prefill", "decode", "both", "state_dir",
    ),
}  # fmt: skip
_NOT: dict[Process, Iterable[str]] = {"controller": ("elastic", "registry_ttl_s", "tls_roles")}

CHAT_KEYS = frozenset({"tls_cert", "tls_key", "tls_ca", "state_dir"})
STATUS_KEYS = CHAT_KEYS | {"registry_token"}
DOWN_KEYS = frozenset({"address", "fleet", "state_dir"})
RESTART_KEYS = STATUS_KEYS | DOWN_KEYS | {"drain_timeout_s"}

FIRST = (
    "model", "role", "registry", "prefill", "decode", "both", "http_listen", "grpc_listen", "listen", "threads",
    "kv_pool_bytes", "max_batch", "policy", "api_keys_file", "registry_token", "address", "detach", "state_dir",
    "log_level",
)  # fmt: skip
"""What most people set, in the order of a long help."""


def section_of() -> dict[str, str]:
    """The title over each key, in the order of Config."""
    titles, title = {}, ""
    for key in Config.model_fields:
        title = SECTIONS[key][0] if key in SECTIONS else title
        titles[key] = title
    return titles


def keys_of(process: Process) -> frozenset[str]:
    """What it reads."""
    found: set[str] = set()
    readers: tuple[Process, ...] = ()
    for key in Config.model_fields:
        readers = SECTIONS[key][1] if key in SECTIONS else readers
        if process in readers:
            found.add(key)
    return frozenset(found.union(_ALSO.get(process, ())).difference(_NOT.get(process, ())))


def keys_of_up() -> frozenset[str]:
    """All that its processes read, but what it settles itself for each of them."""
    own = {"role", "worker_id", "advertise", "sim_count", "reuse_port"}
    return frozenset(Config.model_fields).difference(own)


def keys_of_demo() -> frozenset[str]:
    """It always is one pair of real workers, on ports and in a folder of its own."""
    return keys_of_up() - keys_of("cluster") - {"http_listen", "grpc_listen", "sim", "elastic"}
