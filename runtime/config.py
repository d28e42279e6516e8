"""The one configuration: frozen, validated once, the same keys as flags, in `PDSERVE_*`, and in the YAML file.

Precedence: flag, environment, file, default. Every process gets the whole of it and reads what concerns it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from runtime.errors import InvalidRequest
from runtime.lifecycle import READY_FD

RoleName = Literal["prefill", "decode", "both"]


class Config(BaseSettings):
    """Units are in the names; byte and token counts are plain integers."""

    model_config = SettingsConfigDict(env_prefix="PDSERVE_", frozen=True, extra="forbid", allow_inf_nan=False)

    # the model
    model: str = Field(
        "smollm2", description="a folder with safetensors, a .gguf file, or a shipped name: smollm2, tiny-kimi, oracle"
    )
    served_model_name: str = Field("", description="what the API calls it; empty = the model's own name")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto = the checkpoint's (fp16 runs as bf16 on CPU)"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto = a GPU where there is one")
    max_model_len: int = Field(0, ge=0, description="longest context in tokens; 0 = the model's own")
    load_format: Literal["auto", "safetensors", "gguf", "random"] = Field(
        "auto", description="random: weights of standard deviation 0.1 drawn from `seed`"
    )
    seed: int = Field(0, ge=0, description="of random weights")
    threads: int = Field(0, ge=0, description="of one worker; 0 = cores / workers on this machine")
    compile: bool = Field(False, description="decode steps in code compiled for this CPU (bfloat16 only)")
    compile_cache: str = Field("", description="folder of compiled code; empty = the user's cache folder")
    cuda_graphs: bool = Field(True, description="on a GPU decode steps are launched as one graph")
    deterministic: bool = Field(False, description="a row's numbers never depend on the batch around it (slower)")

    # one worker
    role: RoleName = Field("both", description="what a worker offers")
    worker_id: str = Field("", description="empty = made up")
    listen: str = Field("127.0.0.1:0", description="address of a worker's own server")
    advertise: str = Field("", description="address others reach a worker at; empty = the one listened on")
    metrics_listen: str = Field(
        "127.0.0.1:0", description="address of a worker's own /metrics (plain HTTP); empty = none"
    )
    kv_pool_tokens: int = Field(0, ge=0, description="room for so many tokens; 0 = from kv_pool_bytes")
    kv_pool_bytes: int = Field(512 << 20, gt=0, description="of the KV pages and state slots of one worker")
    max_batch: int = Field(64, gt=0, le=4096, description="answers computed at once")
    max_batched_tokens: int = Field(2048, gt=0, description="of one step, prompts and answers together")
    chunk_tokens: int = Field(
        512, gt=0, description="a prompt is computed in chunks of this size; the same in the whole fleet"
    )
    headroom_tokens: int = Field(64, ge=1, description="decode room reserved beyond the prompt, per choice")
    prefix_cache: bool = Field(True, description="keep pages for prompts that begin alike")
    state_slots: int = Field(
        0, ge=0, description="recurrent states, those the prefix cache keeps included; 0 = 2 x max_batch"
    )
    state_interval_tokens: int = Field(
        0, ge=0, description="keep a state every so many prompt tokens; 0 = only where it pays"
    )
    state_junctions: bool = Field(
        True, description="keep a state where a prompt leaves a path known from another request"
    )
    state_ends: bool = Field(True, description="keep the state at the end of a turn")
    replay_ssm: bool = Field(
        False, description="decode recurrent layers through records; saves memory traffic of large batches on a GPU"
    )
    replay_len: int = Field(16, ge=1, le=256, description="records of replay_ssm before a state is written again")
    transport: Literal["nixl", "inprocess"] = Field("nixl", description="how pages move; inprocess is for tests")
    max_queued_requests: int = Field(256, gt=0, description="waiting in one worker; more are refused")

    # the host tier: pages go down before they are dropped, and come up on a hit when that beats computing them
    host_pool_bytes: int = Field(
        0, ge=0, description="host memory of one worker for pages the device drops; 0 = from host_pool_tokens"
    )
    host_pool_tokens: int = Field(0, ge=0, description="both 0 = no host tier")
    host_state_slots: int = Field(
        0, ge=0, description="recurrent states, those of swapped requests included; 0 = at most half of host_pool_bytes"
    )
    host_store: Literal["all", "prompt"] = Field(
        "all", description="prompt: pages and states with generated tokens are not kept"
    )
    host_store_after: int = Field(1, ge=1, description="kept when seen for the n-th time; 1 = at once")
    host_tokens_per_request: int = Field(0, ge=0, description="kept of one request, from its beginning; 0 = all")
    host_evict: Literal["lru", "flops"] = Field(
        "lru", description="flops: weigh what a page saves against when it was used"
    )
    host_queue_pages: int = Field(64, gt=0, description="on their way down at most; beyond that pages are dropped")
    host_poison: bool = Field(False, description="for tests: what has gone down is overwritten on the device")
    disk_pool_bytes: int = Field(
        0, ge=0, description="below the host tier, half of it for states if there are any; 0 = none"
    )
    disk_pool_dir: str = Field(
        "", description="a folder that survives restarts; each worker of a machine takes a part of its own"
    )
    disk_queue_pages: int = Field(
        64, gt=0, description="on their way to the disk at most, and as many bytes of states; others wait on the host"
    )
    swap: bool = Field(
        True, description="with a host tier: running requests go down under pressure instead of being computed again"
    )

    # simulated workers: the real protocol, cache and leases around a timing model
    sim: str = Field(
        "", description="workers only take the time of this profile: a YAML file, sim-h100-8b or sim-hybrid-48b"
    )
    sim_count: int = Field(1, ge=1, le=1024, description="simulated workers in one process")

    # hand-off
    lease_s: float = Field(10.0, gt=0, description="how long computed pages wait for their reader")
    lease_margin_s: float = Field(1.0, gt=0, description="a reader gives up so long before its lease ends")
    reservation_s: float = Field(5.0, gt=0, description="how long booked room is kept for a request that does not come")
    prefix_fetches: int = Field(
        4, ge=0, description="cached prefixes one worker reads from others, and offers to them, at once; 0 = none"
    )
    transfer_timeout_s: float = Field(30.0, gt=0, description="of one read")
    quarantine_s: float = Field(
        60.0, gt=0, description="a worker whose broken read still owns memory after this time is replaced"
    )
    reattach_s: float = Field(2.0, gt=0, description="a lost stream may come back within this time")
    nixl_progress_us: int = Field(500, ge=0, description="pause of NIXL's progress thread; 0 = none runs")

    # the router
    http_listen: str = Field("127.0.0.1:8000", description="address of the HTTP API")
    grpc_listen: str = Field("127.0.0.1:0", description="address of the gRPC API and the registry")
    admin_listen: str = Field("", description="address of /metrics; empty = on the HTTP port")
    routers: int = Field(
        1,
        ge=1,
        le=64,
        description="router processes that share the HTTP and the gRPC port; several need registry=redis",
    )
    reuse_port: bool = Field(
        False,
        description="another router process of this user may listen on the same addresses: one that takes over from "
        "this one, or from which this one does (`up` sets it)",
    )
    api_keys_file: str = Field(
        "", description="YAML: sha256 of each key -> tenant and limits; empty = open, one tenant"
    )
    cors_origins: str = Field(
        "", description="web pages that may read answers: origins with commas between them, or *; empty = none"
    )
    cache_salt_secret: str = Field(
        "",
        description="keeps tenants' cached prefixes apart, and proves what routers tell each other; the same for all "
        "routers of a deployment; empty = random at every start",
    )
    max_body_bytes: int = Field(4 << 20, gt=0, description="of an HTTP request")
    max_prompt_tokens: int = Field(0, ge=0, description="0 = the context")
    max_n: int = Field(16, gt=0, description="choices of one prompt")
    max_prompts: int = Field(64, gt=0, description="prompts of one request")
    max_stop: int = Field(16, gt=0, description="stop strings")
    max_stop_chars: int = Field(256, gt=0, description="of one stop string")
    max_top_logprobs: int = Field(20, ge=0, description="alternatives per token")
    max_logit_bias: int = Field(1024, gt=0, description="entries")
    max_messages: int = Field(4096, gt=0, description="of one chat")
    max_inflight: int = Field(1024, gt=0, description="prompts in work at once")
    max_queue: int = Field(1024, ge=0, description="prompts waiting for room; more are refused")
    queue_timeout_s: float = Field(
        30.0,
        gt=0,
        description="a prompt waits so long while no worker has room; while they are only busy, to its deadline",
    )
    line_hold_s: float = Field(
        0.25,
        ge=0,
        description="prompts wait in the router, in fair order, while every prefill worker has more than this to do "
        "before them; 0 = they are sent at once",
    )
    request_timeout_s: float = Field(600.0, gt=0, description="of a whole request")
    policy: Literal["least_load", "predicted", "round_robin", "power_of_two", "session_affinity", "dynamo", "sgl"] = (
        Field("least_load", description="how workers are chosen; predicted = by seconds, caches considered")
    )
    ttft_goal_s: float = Field(2.0, gt=0, description="objective of the first token; orders who waits")
    ttft_goal_s_per_1k: float = Field(0.125, ge=0, description="the same, for every 1000 tokens of the prompt")
    tpot_goal_s: float = Field(0.05, ge=0, description="objective of the time between tokens; 0 = none")
    retries: int = Field(3, ge=0, description="how often a request goes on elsewhere after a worker failed it")
    first_token_timeout_s: float = Field(120.0, gt=0, description="a worker silent for so long is given up")
    inter_token_timeout_s: float = Field(30.0, gt=0, description="the same, after the first token")
    stream_buffer_bytes: int = Field(1 << 20, gt=0, description="a client that lags further behind is cut off")
    moves: bool = Field(True, description="running requests leave workers that drain, change role or lack memory")
    moves_at_once: int = Field(4, gt=0, description="requests on their way from worker to worker, at most")
    moves_pressure_s: float = Field(
        1.0, gt=0, description="a worker that has put requests aside for so long gives one to another that has room"
    )
    sse_keepalive_s: float = Field(15.0, gt=0, description="a comment goes out on a stream silent for so long")

    # registry and control
    registry: str = Field(
        "", description='worker: "host:port" of a router, or "redis://..."; router: empty (its own) or "redis://..."'
    )
    registry_token: str = Field(
        "",
        description="what workers show the registry; needed with API keys or TLS (`up` makes one up; Redis: signs)",
    )
    registry_ttl_s: float = Field(3.0, gt=0, description="a worker not heard of for so long is gone")
    drain_timeout_s: float = Field(30.0, gt=0, description="a process told to end finishes what runs, so long at most")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="of all processes")
    log_prompts: bool = Field(False, description="log prompts and answers")

    # elastic roles: pressure 1 = a pool is full, or at its objective
    elastic: bool = Field(False, description="workers change their role as the load does (`up` runs the controller)")
    prefill_min: int = Field(1, ge=1, description="workers that compute prompts at least, those that do both included")
    prefill_max: int = Field(
        0, ge=0, description="Ray is asked for more up to so many, and for fewer; 0 = roles move, the number stays"
    )
    decode_min: int = Field(1, ge=1, description="workers that generate at least, those that do both included")
    decode_max: int = Field(0, ge=0, description="as prefill_max")
    elastic_high: float = Field(0.8, gt=0, description="from this pressure on a role needs help")
    elastic_low: float = Field(0.4, gt=0, description="up to this pressure a role can spare a worker")
    elastic_dwell_s: float = Field(10.0, gt=0, description="pressure counts when it has lasted so long")
    elastic_cooldown_s: float = Field(
        30.0, gt=0, description="between two changes; a worker keeps a new role for twice that"
    )

    # TLS for our own sockets: all three or none
    tls_cert: str = Field("", description="PEM file: our certificate")
    tls_key: str = Field("", description="PEM file: its key")
    tls_ca: str = Field("", description="PEM file: who signs our peers' certificates")
    tls_roles: bool = Field(
        False, description="a peer may call what the role in its certificate's DNS name is for (worker.pdserve, ...)"
    )

    # the local cluster
    prefill: int = Field(1, ge=0, description="workers that compute prompts")
    decode: int = Field(1, ge=0, description="workers that generate")
    both: int = Field(0, ge=0, description="workers that do both")
    address: str = Field("", description="host:port of a running Ray cluster; empty = one of our own, started by `up`")
    fleet: str = Field(
        "default", pattern=r"^[a-z0-9][a-z0-9-]{0,39}$", description="its name, where several share one Ray cluster"
    )
    detach: bool = Field(False, description="leave the cluster running until `pdserve down`")
    state_dir: str = Field(
        "",
        description="the cluster's record and logs; empty = a folder under the user's runtime or temporary directory",
    )

    @model_validator(mode="after")
    def _together(self) -> Config:
        tls = [bool(self.tls_cert), bool(self.tls_key), bool(self.tls_ca)]
        if any(tls) and not all(tls):
            raise ValueError("tls_cert, tls_key and tls_ca go together")
        if self.tls_roles and not self.tls_cert:
            raise ValueError("tls_roles are in certificates: it needs tls_cert, tls_key and tls_ca")
        if self.registry and not _REGISTRY.fullmatch(self.registry):
            raise ValueError('registry must be "host:port" or "redis://host:port/database"')
        if self.routers > 1 and not self.registry.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("routers can be several only with a registry they share: redis://host:port/database")
        if self.chunk_tokens % 256:
            raise ValueError("chunk_tokens must be a multiple of 256")
        if self.state_interval_tokens % 16:
            raise ValueError("state_interval_tokens must be a multiple of 16")
        if self.max_batched_tokens < self.chunk_tokens:
            raise ValueError("max_batched_tokens must hold at least one chunk (chunk_tokens)")
        if self.disk_pool_bytes and not (self.disk_pool_dir and (self.host_pool_bytes or self.host_pool_tokens)):
            raise ValueError("disk_pool_bytes needs disk_pool_dir and a host pool (host_pool_bytes)")
        if self.elastic_low >= self.elastic_high:
            raise ValueError("elastic_low must be less than elastic_high")
        for name in ("prefill", "decode"):
            least, most = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if most and most < least:
                raise ValueError(f"{name}_max must not be less than {name}_min")
        if self.lease_margin_s >= self.lease_s:
            raise ValueError("lease_margin_s must be less than lease_s")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings)  # the file is read by load(), so that its errors can name it

    @classmethod
    def load(cls, flags: Mapping[str, Any], file: str | Path | None = None) -> Config:
        """Build the configuration of a process.

        flags: what the command line gave; None values count as not given. file: YAML with the same keys; without it
        PDSERVE_CONFIG_FILE names one. Raises InvalidRequest naming the key and the limit; never pydantic's own error.
        """
        given = {key: value for key, value in flags.items() if value is not None}
        path = file or os.environ.get(_FILE_ENV, "")
        from_file = _read_yaml(Path(path)) if path else {}
        _refuse_unknown([*from_file, *given, *_environment_keys()])
        overridden = {key for key in from_file if f"{_PREFIX}{key.upper()}" in map(str.upper, os.environ)}
        merged = {key: value for key, value in from_file.items() if key not in overridden} | given
        try:
            return cls(**merged)
        except ValidationError as exc:
            raise _explained(exc) from None
        except SettingsError as exc:
            raise InvalidRequest("an environment variable cannot be read", field="environment") from exc

    def overrides(self) -> dict[str, Any]:
        """The keys that differ from their default, as plain values."""
        fields = type(self).model_fields
        return {key: value for key, value in self if value != fields[key].default}

    def shown(self) -> dict[str, Any]:
        """overrides() for a log: of secrets only that they are set, of addresses no password."""
        return {
            key: "set" if key in SECRET_KEYS else _USERINFO.sub("//", value) if isinstance(value, str) else value
            for key, value in self.overrides().items()
        }

    def child_environment(self, **changes: Any) -> dict[str, str]:
        """PDSERVE_* variables that give a child process this configuration with `changes`, however it was set here.

        Every key is written out, so that neither a variable inherited by the child nor a file changes it;
        PDSERVE_CONFIG_FILE is empty for the same reason. Raises InvalidRequest for changes that do not hold.
        """
        changed = type(self).load({**self.model_dump(), **changes}, None) if changes else self
        return {f"{_PREFIX}{key.upper()}": _text(value) for key, value in changed} | {_FILE_ENV: ""}


_PREFIX = "PDSERVE_"
_FILE_ENV = "PDSERVE_CONFIG_FILE"
_NOT_KEYS = {_FILE_ENV, READY_FD, "PDSERVE_FAULTS", "PDSERVE_CLIENT_KEY"}
_SERVICE_LINK = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_(TCP|UDP)\w*)$")
"""What Kubernetes puts into every container for a Service whose name begins with "pdserve"."""
_REGISTRY = re.compile(r"(redis|rediss|unix)://.+|[^/\s]+:\d{1,5}")
_USERINFO = re.compile(r"//[^@/]*@")
SECRET_KEYS = frozenset({"cache_salt_secret", "registry_token"})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _environment_keys() -> list[str]:
    """Our variables that are set, as keys: a misspelt one must not be silently without effect."""
    names = [name.upper() for name in os.environ if name.upper().startswith(_PREFIX)]
    ours = [name.removeprefix(_PREFIX) for name in names if name not in _NOT_KEYS]
    return [key.lower() for key in ours if not _SERVICE_LINK.search(key)]


def _refuse_unknown(keys: Iterable[str]) -> None:
    for key in keys:
        if key not in Config.model_fields:
            near = difflib.get_close_matches(key, Config.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidRequest(f"{key} is not a configuration key{hint}", field=key, limit="a known key")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"the configuration file {path} cannot be read", field="config") from exc
    except yaml.YAMLError as exc:
        raise InvalidRequest(f"the configuration file {path} is not YAML", field="config") from exc
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InvalidRequest(f"the configuration file {path} must be a mapping of keys", field="config")
    return {key.replace("-", "_"): value for key, value in content.items()}


def _explained(exc: ValidationError) -> InvalidRequest:
    """The first error, with its key and limit. The value is not repeated: it may be a secret."""
    first = exc.errors(include_url=False, include_input=False)[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    limit = first["msg"].removeprefix("Value error, ")
    if not key:  # a rule over several keys: its text names them, the first one is the field
        key = next((word for word in limit.replace(",", " ").split() if word in Config.model_fields), "")
        return InvalidRequest(limit, field=key, limit=limit)
    return InvalidRequest(f"{key}: {limit}", field=key, limit=limit)
