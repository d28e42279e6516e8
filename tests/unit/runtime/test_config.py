from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from runtime.config import Config
from runtime.errors import InvalidRequest


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PDSERVE_")]:
        monkeypatch.delenv(name)


def test_a_flag_wins_over_the_environment_which_wins_over_the_file_which_wins_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public report T006 (NVIDIA/TensorRT-LLM#14812; vllm-project/vllm#8947)."""
    file = tmp_path / "pdserve.yaml"
    file.write_text("max_n: 2\nmax_stop: 2\nmax_queue: 2\n")
    monkeypatch.setenv("PDSERVE_MAX_N", "3")
    monkeypatch.setenv("PDSERVE_MAX_STOP", "3")
    config = Config.load({"max_n": 4}, file)
    assert (config.max_n, config.max_stop, config.max_queue) == (4, 3, 2)
    assert config.max_prompts == Config().max_prompts


def test_a_false_in_the_file_beats_a_default_that_is_true_and_is_shown(tmp_path: Path) -> None:
    """Public report T109 (vllm-project/vllm#51401)."""
    file = tmp_path / "pdserve.yaml"
    file.write_text("prefix_cache: false\nswap: no\nregistry: redis://me:s3cret@10.0.0.1:6379/0\nregistry_token: t\n")
    config = Config.load({}, file)
    assert (config.prefix_cache, config.swap) == (False, False)
    assert config.child_environment()["PDSERVE_PREFIX_CACHE"] == "false"
    assert config.shown() == {
        "prefix_cache": False,
        "swap": False,
        "registry": "redis://10.0.0.1:6379/0",
        "registry_token": "set",
    }


def test_a_flag_that_was_not_given_is_none_and_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_MAX_N", "3")
    assert Config.load({"max_n": None}).max_n == 3


def test_the_environment_may_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("queue-timeout-s: 1.5\n")
    monkeypatch.setenv("PDSERVE_CONFIG_FILE", str(file))
    assert Config.load({}).queue_timeout_s == 1.5


@pytest.mark.parametrize(
    ("flags", "field", "limit"),
    [
        ({"max_n": 0}, "max_n", "greater than 0"),
        ({"max_batch": 5000}, "max_batch", "4096"),
        ({"seed": "abc"}, "seed", "integer"),
        ({"role": "both!"}, "role", "prefill"),
        ({"chunk_tokens": 100}, "chunk_tokens", "256"),
        ({"max_batched_tokens": 256}, "max_batched_tokens", "chunk"),
        ({"lease_margin_s": 10}, "lease_margin_s", "lease_s"),
        ({"tls_cert": "x"}, "tls_cert", "together"),
        ({"tls_roles": True}, "tls_roles", "tls_cert"),
        ({"registry": "foo"}, "registry", "host:port"),
        ({"registry": "http://router:9000"}, "registry", "host:port"),
        ({"max_m": 1}, "max_m", "known key"),
        ({"lease_s": float("nan")}, "lease_s", "finite"),
        ({"queue_timeout_s": float("inf")}, "queue_timeout_s", "finite"),
    ],
)
def test_a_bad_value_names_its_key_and_limit(flags: dict[str, object], field: str, limit: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Config.load(flags)
    assert caught.value.field == field
    assert limit in caught.value.limit


def test_a_misspelt_key_is_refused_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max_nn: 2\n")
    with pytest.raises(InvalidRequest, match="did you mean max_n"):
        Config.load({}, file)
    monkeypatch.setenv("PDSERVE_MAX_NN", "2")
    with pytest.raises(InvalidRequest, match="max_nn"):
        Config.load({})


def test_the_variables_kubernetes_makes_for_a_service_are_not_taken_for_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "PORT", "PORT_8000_TCP_ADDR", "ROUTER_SERVICE_PORT_HTTP", "ROUTER_PORT_8000_TCP"):
        monkeypatch.setenv(f"PDSERVE_{name}", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("PDSERVE_TRANSPORT", "inprocess")
    assert Config.load({}).transport == "inprocess"


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "1: 2", "\x00"])
def test_a_file_that_is_not_a_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequest):
        Config.load({}, file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        Config.load({}, tmp_path / "none.yaml")


def test_a_bad_secret_is_not_repeated_in_the_message() -> None:
    with pytest.raises(InvalidRequest) as caught:
        Config.load({"cache_salt_secret": ["hunter2"]})
    assert "hunter2" not in str(caught.value)


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        Config().max_n = 3  # type: ignore[misc]


def test_a_child_process_gets_the_same_configuration_through_its_environment(tmp_path: Path) -> None:
    config = Config.load({"max_n": 3, "prefix_cache": False, "lease_s": 7.5, "cache_salt_secret": "s"})
    environment = {**os.environ, "PDSERVE_MAX_N": "9", **config.child_environment(role="decode", threads=2)}
    code = "import sys; from runtime.config import Config; sys.stdout.write(Config.load({}).model_dump_json())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Config.model_validate_json(done.stdout) == Config.load(
        {**config.model_dump(), "role": "decode", "threads": 2}
    )


def test_a_change_for_a_child_is_validated() -> None:
    with pytest.raises(InvalidRequest, match="max_n"):
        Config().child_environment(max_n=0)


def test_several_routers_need_a_registry_they_share() -> None:
    for registry in ("", "127.0.0.1:9000"):
        with pytest.raises(InvalidRequest) as refused:
            Config.load({"routers": 2, "registry": registry})
        assert refused.value.field == "routers"
    assert Config.load({"routers": 2, "registry": "redis://127.0.0.1:6379/0"}).routers == 2
