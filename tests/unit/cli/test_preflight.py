"""What is refused before anything is started, in the words of the process that would refuse it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.loop import Engine, EngineSpec
from pdserve import preflight
from pdserve._worker_parts import load_runner, make_ways
from runtime.clock import SystemClock
from runtime.config import Config
from runtime.errors import InvalidRequest, PdserveError
from runtime.modelfiles import ModelFiles
from tests.cluster_tools import run_pdserve
from tests.unit.runtime.servers import RedisServer

TINY: dict[str, Any] = {"model": "tiny-kimi", "dtype": "float32", "threads": 1}


def by_a_worker(config: Config) -> None:
    """A worker's start as far as its engine."""
    files, clock = ModelFiles.open(config.model), SystemClock()
    runner = load_runner(config, files, lambda _: None)
    try:
        Engine(runner, EngineSpec.of(runner.spec(), config), config, clock, make_ways(config, files, clock))
    finally:
        runner.close()


def refusal(check: Callable[[Config], None], config: Config) -> tuple[str, str, str]:
    with pytest.raises(PdserveError) as refused:
        check(config)
    assert isinstance(refused.value, InvalidRequest)
    return refused.value.field, refused.value.message, refused.value.limit


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({**TINY, "kv_pool_bytes": 1000}, "kv_pool_bytes"),
        ({**TINY, "kv_pool_tokens": 15}, "kv_pool_tokens"),
        ({**TINY, "state_slots": 10**6}, "kv_pool_bytes"),
        ({**TINY, "host_pool_bytes": 1000}, "host_pool_bytes"),
        ({**TINY, "host_pool_bytes": 10**6, "host_state_slots": 10**6}, "host_pool_bytes"),
        ({**TINY, "compile": True}, "compile"),
        ({**TINY, "replay_ssm": True, "deterministic": True}, "replay_ssm"),
        ({"model": "smollm2", "compile": True, "deterministic": True}, "compile"),
        ({"model": "oracle", "replay_ssm": True}, "replay_ssm"),
        ({"model": "oracle", "kv_pool_bytes": 10}, "kv_pool_bytes"),
        ({"model": "oracle", "host_pool_bytes": 10}, "host_pool_bytes"),
    ],
)
def test_what_no_worker_could_do_is_refused_in_its_words(keys: dict[str, Any], field: str) -> None:
    config = Config(**keys)
    said = refusal(preflight.check, config)
    assert said[0] == field
    assert said == refusal(by_a_worker, config)


def test_what_a_worker_can_just_do_is_not_refused() -> None:
    """The limit that the refusal names is the limit."""
    too_small = Config(**TINY, kv_pool_bytes=1000, max_batch=1)
    least = int(refusal(preflight.check, too_small)[2].removesuffix(" bytes"))
    enough = too_small.model_copy(update={"kv_pool_bytes": least})
    preflight.check(enough)
    by_a_worker(enough)
    refusal(by_a_worker, too_small.model_copy(update={"kv_pool_bytes": least - 1}))


def test_a_model_type_nobody_computes_is_refused_by_its_name(tmp_path: Path) -> None:
    shutil.copytree(ModelFiles.open("tiny-kimi").path, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "mamba9"}))
    config = Config(model=str(tmp_path / "model"))
    field, message, _ = refusal(preflight.check, config)
    assert (field, "'mamba9'" in message, "kimi_linear" in message) == ("model", True, True)
    assert refusal(preflight.check, config) == refusal(by_a_worker, config)


def test_a_redis_that_is_away_or_refuses_us_is_said_before_anything_waits_for_it(
    tmp_path: Path, free_port: int
) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        preflight.check(Config(model="oracle", registry=redis.url))
        refused = redis.url.replace("redis://", "redis://nobody:not-the-word@")
        for registry in (f"redis://127.0.0.1:{free_port}/0", refused, "redis://127.0.0.1:port/0"):
            field, message, _ = refusal(preflight.check, Config(model="oracle", registry=registry))
            assert field == "registry"
            assert "Redis" in message
            assert "not-the-word" not in message
    finally:
        redis.kill()


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--kv-pool-bytes=1000"], "kv_pool_bytes"),
        (["--api-keys-file=/no/such/file"], "api_keys_file"),
        (["--tls-cert=/no/c", "--tls-key=/no/k", "--tls-ca=/no/a"], "tls_cert"),
        (["--sim=no-such-profile"], "sim"),
    ],
)
@pytest.mark.parametrize("command", ["up", "demo"])
def test_the_command_names_the_key_and_starts_nothing(
    command: str, flags: list[str], field: str, tmp_path: Path
) -> None:
    done = run_pdserve(command, "--model=tiny-kimi", *flags, f"--state-dir={tmp_path}/state")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"pdserve: {field}")
    assert (done.stdout, list(tmp_path.iterdir())) == ("", [])
