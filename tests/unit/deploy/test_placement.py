from __future__ import annotations

from pathlib import Path

import pytest

from deploy.placement import NODE, child_env, most_workers, namespace, plan, secured, settings_of, worker_env
from runtime.config import Config
from runtime.errors import InvalidRequest

JOINED = {"address": "10.0.0.1:6379", "grpc_listen": "10.0.0.1:9000"}


def config(**keys: object) -> Config:
    return Config.load(keys)


def test_every_worker_gets_a_name_a_role_and_its_share_of_the_cores() -> None:
    specs = plan(config(prefill=2, decode=1, both=1), "127.0.0.1:9", cores=8, gpus=0)
    assert [(one.name, one.settings["role"], one.threads) for one in specs] == [
        ("prefill-0", "prefill", 2),
        ("prefill-1", "prefill", 2),
        ("decode-0", "decode", 2),
        ("both-0", "both", 2),
    ]
    assert {one.settings["registry"] for one in specs} == {"127.0.0.1:9"}
    assert {one.gpus for one in specs} == {0.0}


def test_workers_share_too_few_gpus_evenly() -> None:
    assert [one.gpus for one in plan(config(prefill=1, decode=2), "r:1", cores=4, gpus=1)] == [0.33] * 3
    assert [one.gpus for one in plan(config(), "r:1", cores=4, gpus=8)] == [1.0, 1.0]
    assert [one.gpus for one in plan(config(device="cpu"), "r:1", cores=4, gpus=8)] == [0.0, 0.0]


def test_in_a_joined_cluster_threads_are_decided_where_the_cores_are_known() -> None:
    spec = plan(config(**JOINED), "r:1", cores=64, gpus=0)[0]
    assert (spec.threads, spec.cpus) == (0, 1.0)
    assert plan(config(**JOINED, threads=8), "r:1", cores=2, gpus=0)[0].cpus == 8.0


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"prefill": 0}, "prefill"),
        ({"decode": 0}, "prefill"),
        ({"role": "decode"}, "role"),
        ({"worker_id": "me"}, "worker_id"),
        ({"advertise": "h:1"}, "advertise"),
        ({"transport": "inprocess"}, "transport"),
        ({"listen": "127.0.0.1:7000"}, "listen"),
        ({"device": "cuda"}, "device"),
        ({"listen": f"{NODE}:0"}, "listen"),
        ({"address": "10.0.0.1:6379", "grpc_listen": "0.0.0.0:9000"}, "grpc_listen"),
        ({"prefill_max": 4}, "prefill_max"),
        ({"decode_min": 2}, "decode_min"),
        ({"elastic": True, "decode_min": 2}, "decode_min"),
        ({"elastic": True, "decode_max": 4, "sim": "sim-h100-8b"}, "decode_max"),
        ({"elastic": True, "prefill_max": 2, "listen": "127.0.0.1:7000"}, "listen"),
        ({"address": "10.0.0.1:6379", "grpc_listen": "10.0.0.2:0"}, "grpc_listen"),
    ],
)
def test_what_up_cannot_honour_is_refused_by_its_key(keys: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan(config(**keys), "r:1", cores=2, gpus=0)
    assert caught.value.field == field


def test_a_child_sees_the_configuration_of_up_and_no_variable_of_the_shell() -> None:
    shell = {"PATH": "/bin", "PDSERVE_MODEL": "other", "PDSERVE_CONFIG_FILE": "x.yaml", "PDSERVE_FAULTS": "a=delay"}
    env = child_env(shell, settings_of(config(model="oracle", compile=True)))
    assert env == {"PATH": "/bin", "PDSERVE_FAULTS": "a=delay", "PDSERVE_MODEL": "oracle", "PDSERVE_COMPILE": "true"}


def test_a_worker_listens_on_its_node_and_uses_its_threads_only() -> None:
    spec = plan(config(**JOINED, listen=f"{NODE}:0"), "r:1", cores=2, gpus=0)[0]
    env = worker_env({"UCX_TLS": "tcp"}, spec, 3, "10.0.0.7")
    assert env["PDSERVE_LISTEN"] == "10.0.0.7:0"
    assert (env["OMP_NUM_THREADS"], env["PDSERVE_THREADS"]) == ("3", "3")
    assert (env["UCX_MODULES"], env["UCX_TLS"]) == ("^efa", "tcp")


def test_the_transport_of_a_worker_on_the_loopback_listens_on_no_network_card() -> None:
    local = plan(config(), "r:1", cores=2, gpus=0)[0]
    assert worker_env({}, local, 1, "127.0.0.2")["UCX_NET_DEVICES"] == "lo"
    assert worker_env({"UCX_NET_DEVICES": "mlx5_0:1"}, local, 1, "127.0.0.2")["UCX_NET_DEVICES"] == "mlx5_0:1"
    spread = plan(config(**JOINED, listen=f"{NODE}:0"), "r:1", cores=2, gpus=0)[0]
    assert "UCX_NET_DEVICES" not in worker_env({}, spread, 1, "10.0.0.7")


def test_a_path_means_the_same_in_every_process(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    with open("weights.gguf", "w"):
        pass
    assert settings_of(config(model="weights.gguf"))["model"] == f"{tmp_path}/weights.gguf"
    assert settings_of(config(model="oracle"))["model"] == "oracle"


def test_every_start_of_a_clusters_router_makes_the_same_salts_and_workers_are_not_told() -> None:
    one, two = secured(Config()), secured(Config())
    assert one.cache_salt_secret != two.cache_salt_secret != ""
    assert secured(Config(cache_salt_secret="mine")).cache_salt_secret == "mine"
    assert settings_of(one)["cache_salt_secret"] == one.cache_salt_secret
    assert all("cache_salt_secret" not in spec.settings for spec in plan(one, "127.0.0.1:1", cores=2, gpus=0))


def test_workers_get_a_token_and_the_same_one_the_next_time_where_there_is_a_secret(tmp_path: Path) -> None:
    key = tmp_path / "tls.key"
    key.write_text("private")
    tls = {"tls_cert": "c", "tls_key": str(key), "tls_ca": "a"}
    assert secured(Config()).registry_token != secured(Config()).registry_token != ""
    assert secured(Config(registry="redis://127.0.0.1:1")).registry_token == "", "workers register in Redis"
    assert secured(Config(address="127.0.0.1:1")).registry_token == "", "its workers outlive who would know it"
    named = Config(cache_salt_secret="mine")
    assert secured(named).registry_token == secured(named).registry_token
    assert secured(Config(api_keys_file="k", registry_token="mine")).registry_token == "mine"
    assert secured(config(**tls)).registry_token == secured(config(**tls)).registry_token != ""
    one, two = secured(Config(api_keys_file="k")), secured(Config(api_keys_file="k"))
    assert one.registry_token != two.registry_token
    assert settings_of(one)["registry_token"] == one.registry_token
    with pytest.raises(InvalidRequest) as refused:
        secured(Config(api_keys_file="k", address="127.0.0.1:1"))
    assert refused.value.field == "registry_token"


def test_an_elastic_fleet_leaves_room_for_as_many_as_it_may_become() -> None:
    wide = config(elastic=True, prefill=1, prefill_max=3, decode=2, decode_max=2)
    assert most_workers(wide) == 5
    assert [one.threads for one in plan(wide, "r:1", cores=10, gpus=0)] == [2, 2, 2]
    assert plan(wide, "r:1", cores=10, gpus=1)[0].gpus == 0.2
    assert most_workers(config(elastic=True, prefill=2, decode=3, both=1)) == 6, "its number stays"


def test_a_fleet_has_a_namespace_of_its_own_in_ray() -> None:
    assert namespace(config()) == "pdserve"
    assert namespace(config(fleet="blue")) == "pdserve-blue"
    with pytest.raises(InvalidRequest) as caught:
        config(fleet="Blue team")
    assert caught.value.field == "fleet"
