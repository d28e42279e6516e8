from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import processes
from deploy.ports import NOT_EPHEMERAL, admin_addresses, free_ports, settle
from deploy.state import ClusterRecord, StateDir
from runtime.config import Config
from runtime.errors import InvalidRequest
from tests.cluster_tools import ROOT


def record(pid: int, start: int) -> ClusterRecord:
    return ClusterRecord(pid, start, "h:1", "h:2", "r:3", "", "pdserve", ("prefill-0", "decode-0"), "oracle", False)


def test_a_record_is_read_as_it_was_written_and_by_its_owner_only(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    assert state.read() is None
    me = processes.look(os.getpid())
    assert me is not None
    state.write(record(me.pid, me.start))
    assert state.read() == record(me.pid, me.start)
    assert record(me.pid, me.start).running
    assert not record(me.pid, me.start - 1).running
    assert state.folder.stat().st_mode & 0o777 == 0o700


def test_a_damaged_record_is_refused_by_its_key(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    (tmp_path / "cluster.json").write_text("{")
    with pytest.raises(InvalidRequest) as caught:
        state.read()
    assert caught.value.field == "state_dir"


def test_a_folder_that_cannot_be_used_is_refused_by_its_key_and_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for use in (StateDir.create, lambda state: state.locked().__enter__()):
        with pytest.raises(InvalidRequest, match="file/state") as caught:
            use(StateDir(tmp_path / "file" / "state"))
        assert caught.value.field == "state_dir"
    assert StateDir(tmp_path / "file" / "state").read() is None


def test_a_full_disk_keeps_the_last_record_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    """A limit on the size of files is a disk that is full for one process."""
    code = (
        "import resource, signal, sys\n"
        "from dataclasses import replace\n"
        "from deploy.state import StateDir\n"
        "from runtime.errors import InvalidRequest\n"
        "from tests.unit.deploy.test_state import record\n"
        "state = StateDir(sys.argv[1])\nstate.create()\nstate.write(record(1, 1))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try:\n    state.write(replace(record(1, 1), model='x' * 10000))\n"
        "except InvalidRequest as error:\n    print(error.field, error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.startswith("state_dir the folder ")
    assert StateDir(tmp_path / "s").read() == record(1, 1)
    assert sorted(one.name for one in (tmp_path / "s").iterdir()) == ["cluster.json", "logs"]


def test_one_folder_holds_one_cluster(tmp_path: Path) -> None:
    with StateDir(tmp_path).locked(), pytest.raises(InvalidRequest, match="another"), StateDir(tmp_path).locked():
        pass
    with StateDir(tmp_path).locked():
        pass


def test_a_default_folder_goes_with_the_cluster_and_a_named_one_keeps_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for state in (StateDir(), StateDir(tmp_path / "named")):
        state.create()
        state.write(record(1, 1))
        (state.logs / "router.log").write_text("1\n2\n3\n")
        assert state.tail("router", 2) == "2\n3"
        state.clear()
    assert not (tmp_path / "pdserve").exists()
    assert [one.name for one in (tmp_path / "named").iterdir()] == ["logs"]


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(InvalidRequest):
        StateDir(tmp_path / "link").create()


def test_port_zero_becomes_a_real_one_and_a_taken_one_is_refused_by_its_key() -> None:
    import socket

    address = settle("127.0.0.1:0", "http_listen")
    assert not address.endswith(":0")
    assert settle(address, "http_listen") == address
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match="in use") as caught:
            settle(f"127.0.0.1:{port}", "http_listen")
    assert caught.value.field == "http_listen"
    ports = free_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20
    assert all(port in NOT_EPHEMERAL for port in ports), "a connection made meanwhile could take it"


def test_every_router_process_has_an_address_for_its_metrics_and_one_alone_needs_none() -> None:
    assert admin_addresses(Config()) == [""]
    several = Config(routers=3, registry="redis://127.0.0.1:1")
    assert len(set(admin_addresses(several))) == 3
    (free,) = free_ports("127.0.0.1", 1)
    counted = admin_addresses(several.model_copy(update={"admin_listen": f"127.0.0.1:{free}", "routers": 1}))
    assert counted == [f"127.0.0.1:{free}"]
    with pytest.raises(InvalidRequest) as refused:
        admin_addresses(several.model_copy(update={"admin_listen": "127.0.0.1:0"}))
    assert refused.value.field == "admin_listen"
