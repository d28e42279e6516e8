"""Which workers to start, and with what: decided once, plainly, before anything runs. Ray-free."""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from runtime.addresses import is_loopback
from runtime.config import Config
from runtime.errors import InvalidRequest
from runtime.registry import check_of_router

ENV_PREFIX = "PDSERVE_"
_NOT_SETTINGS = frozenset({"PDSERVE_FAULTS"})  # fail-points: for every process, and no configuration key
NODE = "node"
"""As the host of an address a worker listens on: the address of the Ray node it lands on."""

WORKER_ADDRESSES = ("listen", "metrics_listen")
ELASTIC_KEYS = ("prefill_min", "prefill_max", "decode_min", "decode_max")


def namespace(config: Config) -> str:
    """Of a fleet's actors in Ray: fleets with other names know nothing of each other."""
    return "pdserve" if config.fleet == "default" else f"pdserve-{config.fleet}"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker as its supervising actor gets it. settings: configuration keys; env: everything else it is to see."""

    name: str
    role: str
    threads: int  # 0: a share of the Ray cluster's cores, known only there
    cpus: float
    gpus: float
    settings: dict[str, str]
    env: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def roles(config: Config) -> list[tuple[str, str]]:
    """(name, role) of every worker, prefill first."""
    counts = (("prefill", config.prefill), ("decode", config.decode), ("both", config.both))
    return [(f"{role}-{i}", role) for role, count in counts for i in range(count)]


def most_workers(config: Config) -> int:
    """As many as there may be at once: those configured, and what an elastic fleet grows to."""
    counts = [max(config.prefill, config.prefill_max), max(config.decode, config.decode_max), config.both]
    return sum(counts) if config.elastic else len(roles(config))


def check(config: Config) -> None:
    """Refuse what cannot work or would not be honoured. Raises InvalidRequest naming the key."""
    if config.both == 0 and (config.prefill == 0 or config.decode == 0):
        raise InvalidRequest("a cluster needs a prefill and a decode worker, or one that is both", field="prefill")
    if config.role != "both":
        raise InvalidRequest("`up` places workers by the keys prefill, decode and both", field="role")
    if config.worker_id or config.advertise:
        key = "worker_id" if config.worker_id else "advertise"
        raise InvalidRequest("belongs to one worker; `up` names and addresses each itself", field=key)
    if config.transport == "inprocess":
        raise InvalidRequest("workers are processes of their own here: use nixl", field="transport")
    if config.sim and config.address:
        raise InvalidRequest("simulated workers run on this machine, without Ray", field="address")
    check_of_router(config)
    for key in WORKER_ADDRESSES:
        _check_worker_address(config, key)
    if config.address and not config.registry:
        _check_reachable(config.grpc_listen)
    _check_elastic(config)


def _check_elastic(config: Config) -> None:
    changed = config.overrides()
    for key in ELASTIC_KEYS:
        if key in changed and not config.elastic:
            raise InvalidRequest("bounds an elastic fleet: set elastic, too", field=key)
        if key.endswith("_max") and key in changed and config.sim:
            raise InvalidRequest("simulated workers change roles, their number stays", field=key)
    for role in ("prefill", "decode"):
        least, count = getattr(config, f"{role}_min"), getattr(config, role) + config.both
        if config.elastic and count < least:
            raise InvalidRequest(f"the fleet begins below its minimum: {count} workers", field=f"{role}_min")


def _check_worker_address(config: Config, key: str) -> None:
    listen = getattr(config, key)
    if not listen and key == "metrics_listen":  # none is served
        return
    if most_workers(config) > 1 and port_of(listen, key):
        raise InvalidRequest("several workers cannot share one port: use port 0", field=key, limit="0")
    if not config.address and host_of(listen) == NODE:
        raise InvalidRequest("`node` as a host needs a Ray cluster to join (address)", field=key)


def _check_reachable(grpc_listen: str) -> None:
    """Workers that outlive this router look for the next one where this one was."""
    if host_of(grpc_listen) in ("", "0.0.0.0", "[::]"):
        raise InvalidRequest("workers elsewhere must be told an address they can reach", field="grpc_listen")
    if not port_of(grpc_listen, "grpc_listen"):
        raise InvalidRequest("workers outlive the router and look for its port: name one", field="grpc_listen")


def secured(config: Config) -> Config:
    """Workers show the registry a token, so that no stray process of this machine registers: the one configured, else
    one made from a secret of ours (so that the next `up` of the same cluster makes the same), else a random one.

    Workers that join a running Ray cluster would outlive the only process that knows a random one: then there is none,
    and where clients need a key or a certificate this raises InvalidRequest."""
    named_salt, config = config.cache_salt_secret, _salted(config)
    if config.registry or config.registry_token:
        return config
    if config.tls_key or named_salt:
        secret = Path(config.tls_key).read_bytes() if config.tls_key else named_salt.encode()
        token = hmac.new(secret, b"pdserve registry token", "sha256").hexdigest()
    elif config.address:
        if not (config.api_keys_file or config.tls_cert):
            return config
        raise InvalidRequest("workers outlive this router: name the token they show", field="registry_token")
    else:
        token = secrets.token_urlsafe(32)
    return config.model_copy(update={"registry_token": token})


_ROUTERS_OWN = {"cache_salt_secret": "", "routers": 1}
"""Nothing a worker is to know."""


def _salted(config: Config) -> Config:
    """A router that is started again, or a second one, makes the salts that the cached prefixes live under."""
    if config.cache_salt_secret:
        return config
    return config.model_copy(update={"cache_salt_secret": secrets.token_urlsafe(32)})


def plan(config: Config, registry: str, *, cores: int, gpus: int) -> list[WorkerSpec]:
    """The workers of `config`. cores and gpus: of this machine, used when Ray is started here."""
    check(config)
    return [spec_of(config, registry, name, role, cores=cores, gpus=gpus) for name, role in roles(config)]


def spec_of(config: Config, registry: str, name: str, role: str, *, cores: int, gpus: int) -> WorkerSpec:
    """One worker. Of this machine each gets the share that leaves room for all there may be."""
    most = most_workers(config)
    threads = config.threads or (0 if config.address else max(1, cores // most))
    return WorkerSpec(
        name=name,
        role=role,
        threads=threads,
        cpus=float(max(1, threads)) if config.address else 1.0,
        gpus=_gpu_share(config, gpus, most),
        settings=worker_settings(config, registry, name, role),
    )


def worker_settings(config: Config, registry: str, name: str, role: str) -> dict[str, str]:
    """What one worker's process is configured with."""
    own = {"role": role, "worker_id": name, "registry": registry}
    return settings_of(config.model_copy(update=_ROUTERS_OWN)) | own


def _gpu_share(config: Config, gpus: int, workers: int) -> float:
    if config.device == "cpu" or (config.device == "auto" and gpus == 0):
        return 0.0
    if gpus == 0 and not config.address:
        raise InvalidRequest("there is no GPU on this machine", field="device")
    if config.address or gpus >= workers:
        return 1.0
    return int(100 * gpus / workers) / 100  # workers share a card; Ray takes hundredths


_PATHS = frozenset({"model", "api_keys_file", "tls_cert", "tls_key", "tls_ca"})


def settings_of(config: Config) -> dict[str, str]:
    """Every key that differs from its default, as environment text. Paths of this machine are made absolute."""
    return {key: _text(key, value) for key, value in config.overrides().items()}


def _text(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if key in _PATHS and os.path.exists(str(value)):
        return os.path.abspath(str(value))
    return str(value)


def child_env(environ: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process of the cluster: its configuration is `settings` and nothing inherited."""
    kept = {key: value for key, value in environ.items() if not key.startswith(ENV_PREFIX) or key in _NOT_SETTINGS}
    return kept | {ENV_PREFIX + key.upper(): value for key, value in settings.items()}


def worker_env(environ: Mapping[str, str], spec: WorkerSpec, threads: int, node: str) -> dict[str, str]:
    """The environment of a worker process on the node with address `node`."""
    settings = {**spec.settings, "threads": str(threads)}
    for key in WORKER_ADDRESSES:
        listen = settings.get(key, "")
        if listen and host_of(listen) == NODE:
            settings[key] = f"{node}:{port_of(listen)}"
    env = child_env(environ, settings) | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    env.setdefault("UCX_MODULES", "^efa")  # the bundled efa module crashes at exit beside a system libefa
    if is_loopback(host_of(settings.get("listen", Config.model_fields["listen"].default))):
        env.setdefault("UCX_NET_DEVICES", "lo")  # UCX listens on every network card, and asks nobody who he is
    return env | spec.env


def host_of(listen: str) -> str:
    return listen.rpartition(":")[0]


def port_of(listen: str, field: str = "listen") -> int:
    """Raises InvalidRequest when there is none."""
    port = listen.rpartition(":")[2]
    if not port.isdigit() or int(port) > 65535:
        raise InvalidRequest("an address is host:port", field=field, limit="host:port")
    return int(port)


def local_gpus() -> int:
    """NVIDIA cards of this machine, without asking a library."""
    try:
        return len(os.listdir(Path("/proc/driver/nvidia/gpus")))
    except FileNotFoundError:
        return 0
