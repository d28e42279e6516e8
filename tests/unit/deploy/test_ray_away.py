from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy import processes
from deploy.actors import Actors, RayFailed, answers
from deploy.cluster import StartFailed, down
from deploy.state import ClusterRecord, StateDir
from runtime.config import Config
from runtime.errors import InvalidRequest
from tests.cluster_tools import run_pdserve


@pytest.mark.parametrize("address", ["", "host", "host:", "host:x", "host:70000", ":1"])
def test_what_is_no_address_is_refused_by_its_key(address: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        answers(address)
    assert refused.value.field == "address"


def test_a_ray_that_is_not_there_is_told_at_once(free_port: int) -> None:
    began = time.monotonic()
    with pytest.raises(RayFailed, match=f"Ray at 127.0.0.1:{free_port} does not answer"):
        Actors(f"127.0.0.1:{free_port}", "pdserve").stop()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("address", "said"), [("127.0.0.1:1", "no Ray answers at"), ("nowhere", "host:port")])
def test_up_refuses_a_wrong_address_before_it_starts_anything(address: str, said: str, tmp_path: Path) -> None:
    flags = [f"--address={address}", "--grpc-listen=127.0.0.1:9", f"--state-dir={tmp_path}/s", "--model=oracle"]
    done = run_pdserve("up", *flags)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert done.stderr.startswith("pdserve: address: ")
    assert said in done.stderr


def test_down_ends_the_router_when_ray_is_away_and_says_what_is_left(tmp_path: Path, free_port: int) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        me = processes.look(launcher.pid)
        assert me is not None
        state = StateDir(tmp_path / "s")
        state.create()
        ray = f"127.0.0.1:{free_port}"
        state.write(ClusterRecord(me.pid, me.start, "h:1", "h:2", ray, "", "pdserve", ("both-0",), "oracle", False))
        with pytest.raises(StartFailed) as failed:
            down(Config(state_dir=str(state.folder)))
        assert str(failed.value).startswith("ended: router; the workers could not be ended: ")
        assert ray in str(failed.value)
        assert launcher.wait(5) < 0
        assert state.read() is None
    finally:
        if launcher.poll() is None:
            os.kill(launcher.pid, 9)
            launcher.wait()
