"""Which client is connected to whom."""

import os
import socket

from chaos.sockets import client_ports_of


def test_only_connections_that_the_process_has_accepted_are_its_clients() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            own = client.getsockname()[1]
            assert client_ports_of(os.getpid(), port) == set(), "it waits in the backlog"
            accepted, _ = listener.accept()
            with accepted:
                assert client_ports_of(os.getpid(), port) == {own}
                assert client_ports_of(os.getppid(), port) == set()
                assert client_ports_of(2**22 + 1, port) == set(), "nobody has that pid"
