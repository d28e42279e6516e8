from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from runtime.listeners import turn_away


def listener(port: int = 0, host: str = "127.0.0.1") -> socket.socket:
    one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind((host, port))
    one.listen()
    one.settimeout(20)
    return one


@pytest.fixture(params=["127.0.0.1", "::1"])
def old(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with listener(host=request.param) as one:
        yield one


def test_what_a_leaving_listener_was_dealt_it_accepts_and_what_comes_later_goes_to_the_next(old: socket.socket) -> None:
    address = old.getsockname()[:2]
    before = socket.create_connection(address)
    assert turn_away({address[1]}) == 1

    came: list[socket.socket] = []
    later = threading.Thread(target=lambda: came.append(socket.create_connection(address, timeout=20)))
    later.start()
    served, _ = old.accept()
    old.settimeout(0.3)
    with pytest.raises(TimeoutError):
        old.accept()
    old.close()
    with listener(address[1], address[0]) as new:
        taken, _ = new.accept()
        later.join()
        for client, server in ((before, served), (came[0], taken)):
            with client, server:
                client.sendall(b"ping")
                assert server.recv(4) == b"ping"
                server.sendall(b"pong")
                assert client.recv(4) == b"pong"


def test_listeners_on_other_ports_and_sockets_that_do_not_listen_are_left_alone(old: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX) as unix, listener() as other, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        assert turn_away({silent.getsockname()[1]}) == 0
        assert turn_away({old.getsockname()[1]}) == 1
        begun = time.monotonic()
        with socket.create_connection(other.getsockname()), other.accept()[0]:
            assert time.monotonic() - begun < 0.9, "a connection that was turned away takes a second"
        assert unix.fileno() >= 0
