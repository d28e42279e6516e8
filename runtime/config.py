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

RoleName = Literal["prefill", "decode", "both"]


class Config(BaseSettings):
    """Units are in the names; byte and token counts are plain integers."""

    model_config = SettingsConfigDict(env_prefix="PDSERVE_", frozen=True, extra="forbid", allow_inf_nan=False)

    # the model
    model: str = "smollm2"  # a folder (safetensors), a .gguf file, or a shipped name: smollm2, tiny-kimi, oracle
    served_model_name: str = ""  # "" = the model's own name
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int = Field(0, ge=0)  # 0 = the model's own
    load_format: Literal["auto", "safetensors", "gguf", "random"] = "auto"  # random: std 0.1 from `seed`
    seed: int = Field(0, ge=0)
    threads: int = Field(0, ge=0)  # per worker; 0 = cores / workers on this machine
    compile: bool = False  # decode steps in code compiled for this CPU (bfloat16 only)
    compile_cache: str = ""  # folder of compiled code; "" = the user's cache folder
    deterministic: bool = False

    # one worker
    role: RoleName = "both"
    worker_id: str = ""  # "" = made up
    listen: str = "127.0.0.1:0"
    advertise: str = ""  # "" = the address listened on
    kv_pool_tokens: int = Field(0, ge=0)  # 0 = from kv_pool_bytes
    kv_pool_bytes: int = Field(512 << 20, gt=0)
    max_batch: int = Field(64, gt=0, le=4096)
    max_batched_tokens: int = Field(2048, gt=0)
    chunk_tokens: int = Field(512, gt=0)
    headroom_tokens: int = Field(64, ge=1)  # decode room reserved beyond the prompt, per choice
    prefix_cache: bool = True
    state_slots: int = Field(0, ge=0)  # recurrent states, those the prefix cache keeps included; 0 = 2 x max_batch
    state_interval_tokens: int = Field(0, ge=0)  # keep a state every so many prompt tokens; 0 = only where it pays
    state_junctions: bool = True  # keep a state where a prompt leaves a path known from another request
    state_ends: bool = True  # keep the state at the end of a turn
    transport: Literal["nixl", "inprocess"] = "nixl"
    max_queued_requests: int = Field(256, gt=0)

    # the host tier: pages go down before they are dropped, and come up on a hit when that beats computing them
    host_pool_bytes: int = Field(0, ge=0)  # 0 = from host_pool_tokens
    host_pool_tokens: int = Field(0, ge=0)  # both 0 = no host tier
    host_store: Literal["all", "prompt"] = "all"  # prompt: pages with generated tokens are not kept
    host_store_after: int = Field(1, ge=1)  # a page is kept at its so-maniest sighting
    host_tokens_per_request: int = Field(0, ge=0)  # kept of one request, from its beginning; 0 = all
    host_evict: Literal["lru", "flops"] = "lru"  # flops: weigh what a page saves against when it was used
    host_queue_pages: int = Field(64, gt=0)  # on their way down at most; beyond that pages are dropped
    host_poison: bool = False  # for tests: what has gone down is overwritten on the device
    swap: bool = True  # with a host tier: running requests go down under pressure instead of being computed again

    # hand-off
    lease_s: float = Field(10.0, gt=0)
    lease_margin_s: float = Field(1.0, gt=0)
    reservation_s: float = Field(5.0, gt=0)
    transfer_timeout_s: float = Field(30.0, gt=0)
    quarantine_s: float = Field(60.0, gt=0)
    reattach_s: float = Field(2.0, gt=0)
    nixl_progress_us: int = Field(500, ge=0)

    # the router
    http_listen: str = "127.0.0.1:8000"
    grpc_listen: str = "127.0.0.1:0"
    admin_listen: str = ""  # "" = /metrics on the HTTP port
    api_keys_file: str = ""  # YAML: sha256 of each key -> tenant and limits; "" = open, one tenant
    cors_origins: str = ""  # web pages that may read answers: origins with commas between them, or *; "" = none
    cache_salt_secret: str = ""  # "" = random per router start
    max_body_bytes: int = Field(4 << 20, gt=0)
    max_prompt_tokens: int = Field(0, ge=0)  # 0 = the context
    max_n: int = Field(16, gt=0)
    max_prompts: int = Field(64, gt=0)
    max_stop: int = Field(16, gt=0)
    max_stop_chars: int = Field(256, gt=0)
    max_top_logprobs: int = Field(20, ge=0)
    max_logit_bias: int = Field(1024, gt=0)
    max_messages: int = Field(4096, gt=0)
    max_inflight: int = Field(1024, gt=0)
    max_queue: int = Field(1024, ge=0)
    queue_timeout_s: float = Field(30.0, gt=0)
    request_timeout_s: float = Field(600.0, gt=0)
    retries: int = Field(3, ge=0)  # how often a request goes on elsewhere after a worker failed it
    first_token_timeout_s: float = Field(120.0, gt=0)
    inter_token_timeout_s: float = Field(30.0, gt=0)
    stream_buffer_bytes: int = Field(1 << 20, gt=0)
    sse_keepalive_s: float = Field(15.0, gt=0)

    # registry and control
    registry: str = ""  # worker: "host:port" of a router, or "redis://..."; router: "" (embedded) or "redis://..."
    registry_token: str = ""  # what workers show the router's registry; needed with API keys or TLS (`up` makes one up)
    registry_ttl_s: float = Field(3.0, gt=0)
    drain_timeout_s: float = Field(30.0, gt=0)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_prompts: bool = False

    # TLS for our own sockets: all three or none
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""

    # the local cluster
    prefill: int = Field(1, ge=0)
    decode: int = Field(1, ge=0)
    both: int = Field(0, ge=0)
    address: str = ""  # of a running Ray cluster; "" = start one here
    detach: bool = False
    state_dir: str = ""  # "" = a folder under the user's runtime or temporary directory

    @model_validator(mode="after")
    def _together(self) -> Config:
        tls = [bool(self.tls_cert), bool(self.tls_key), bool(self.tls_ca)]
        if any(tls) and not all(tls):
            raise ValueError("tls_cert, tls_key and tls_ca go together")
        if self.chunk_tokens % 256:
            raise ValueError("chunk_tokens must be a multiple of 256")
        if self.state_interval_tokens % 16:
            raise ValueError("state_interval_tokens must be a multiple of 16")
        if self.max_batched_tokens < self.chunk_tokens:
            raise ValueError("max_batched_tokens must hold at least one chunk (chunk_tokens)")
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

    def child_environment(self, **changes: Any) -> dict[str, str]:
        """PDSERVE_* variables that give a child process this configuration with `changes`, however it was set here.

        Every key is written out, so that neither a variable inherited by the child nor a file changes it;
        PDSERVE_CONFIG_FILE is empty for the same reason. Raises InvalidRequest for changes that do not hold.
        """
        changed = type(self).load({**self.model_dump(), **changes}, None) if changes else self
        return {f"{_PREFIX}{key.upper()}": _text(value) for key, value in changed} | {_FILE_ENV: ""}

    def child_flags(self, **changes: Any) -> list[str]:
        """The same as command-line flags (`--key=value`), only what differs from the defaults. Secrets are left out:
        other users see a process's arguments."""
        changed = type(self).load({**self.model_dump(), **changes}, None) if changes else self
        return [
            f"--{key.replace('_', '-')}={_text(value)}"
            for key, value in changed.overrides().items()
            if key not in SECRET_KEYS
        ]


_PREFIX = "PDSERVE_"
_FILE_ENV = "PDSERVE_CONFIG_FILE"
_NOT_KEYS = {_FILE_ENV, "PDSERVE_FAULTS", "PDSERVE_CLIENT_KEY"}
_SERVICE_LINK = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_(TCP|UDP)\w*)$")
"""What Kubernetes puts into every container for a Service whose name begins with "pdserve"."""
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
