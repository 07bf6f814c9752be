"""What a worker answers to a routing table is what is in force then."""

import logging
import os
import socket
from pathlib import Path

import msgspec
import pytest

from cache.rpc import Hello, RpcClient
from supervisor.gateway.app import Worker
from supervisor.gateway.control import ControlServer
from supervisor.gateway.protocol import (
    PROTOCOL,
    VERSION,
    GatewayLimits,
    GatewaySpec,
    GroupRoute,
    Routes,
    RoutesAck,
)


async def test_an_older_table_is_answered_with_the_sequence_that_is_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "supervisor.gateway.control")
    limits = GatewayLimits(1 << 16, 100, 10, 0.3, 1.0, 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = Worker(
            GatewaySpec("w", str(tmp_path / "w.sock"), os.dup(listener.fileno()), limits)
        )
        server = ControlServer(tmp_path / "w.sock", worker, listener=lambda: listener)
        await server.start()
        hello = Hello(PROTOCOL, VERSION)
        client, _ = await RpcClient.connect(tmp_path / "w.sock", hello, timeout_s=2)
        answers = []
        for sequence in (7, 6, 7, 8):
            table = Routes(sequence, [GroupRoute("chat", 1, 2048, None)])
            raw, _ = await client.call("routes", table, timeout_s=2)
            answers.append(msgspec.json.decode(raw, type=RoutesAck).sequence)
        client.close()
        server.close()
        worker._sock.close()
    assert answers == [7, 7, 7, 8]
    assert [r.getMessage().split()[6] for r in caplog.records if "in force" in r.message] == [
        "sequence=7", "sequence=7", "sequence=8",
    ]  # fmt: skip
