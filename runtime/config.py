"""The one configuration: frozen, validated once, the same keys as flags, in `PDSERVE_*`, and in the YAML file.

Precedence: flag, environment, file, default. Every process gets the whole of it and reads what concerns it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)


RoleName = Literal["prefill", "decode", "both"]


class Config(BaseSettings):
    """Units are in the names; byte and token counts are plain integers."""

    model_config = SettingsConfigDict(
        env_prefix="PDSERVE_", frozen=True, extra="forbid", yaml_file_encoding="utf-8"
    )

    # the model
    model: str = "smollm2"  # a folder (safetensors), a .gguf file, or a shipped name: smollm2, tiny-kimi, oracle
    served_model_name: str = ""  # "" = the model's own name
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int = Field(0, ge=0)  # 0 = the model's own
    load_format: Literal["auto", "safetensors", "gguf", "random"] = "auto"  # random: std 0.1 from `seed`
    seed: int = Field(0, ge=0)
    threads: int = Field(0, ge=0)  # per worker; 0 = cores / workers on this machine
    compile: bool = False
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
    transport: Literal["nixl", "inprocess"] = "nixl"
    max_queued_requests: int = Field(256, gt=0)

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
    first_token_timeout_s: float = Field(120.0, gt=0)
    inter_token_timeout_s: float = Field(30.0, gt=0)
    stream_buffer_bytes: int = Field(1 << 20, gt=0)
    sse_keepalive_s: float = Field(15.0, gt=0)

    # registry and control
    registry: str = ""  # worker: "host:port" of a router, or "redis://..."; router: "" (embedded) or "redis://..."
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
        sources: list[PydanticBaseSettingsSource] = [init_settings, env_settings]
        path = os.environ.get("PDSERVE_CONFIG_FILE", "")
        if path:
            sources.append(YamlConfigSettingsSource(settings_cls, yaml_file=path))
        return tuple(sources)

    @classmethod
    def load(cls, flags: dict[str, Any], file: str | Path | None = None) -> Config:
        """Build the configuration of a process.

        Raises InvalidRequest naming the key and the limit; never pydantic's own error.
        """
        raise AssertionError("written by the runtime part")  # pragma: no cover
