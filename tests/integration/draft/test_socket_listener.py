"""Who is let in to a draft service's sockets: whoever shows the token of a stream, once."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from draft_service.local_door import LocalDoor
from draft_service.socket_listener import SocketListener, SocketPeer
from draft_service.tcp_door import TcpDoor
from kvbraid.address import split_address
from kvbraid.errors import ConfigError, StartupError, UnavailableError
from kvbraid.settings import ServerSettings, TlsSettings
from kvbraid.testing.certificates import CertificateAuthority
from kvbraid.transport.draft_socket import DraftSocket, connect_local_socket, connect_tcp
from kvbraid.transport.draft_terms import LocalSocketOffer, TcpOffer
from kvbraid.transport.local_socket import abstract_address

PLAINTEXT = TlsSettings()


class Entrance:
    """A listener, and how one gets to it."""

    def __init__(self, kind: str, terms: Any, server: ServerSettings) -> None:
        self.terms, self.tls = terms, server.tls
        self.door = LocalDoor(terms) if kind == "local_socket" else TcpDoor(server, 0)
        self.listener = SocketListener(self.door)
        self.peers: list[SocketPeer] = []

    def offer(self) -> LocalSocketOffer | TcpOffer:
        offer = self.listener.offer(self.peers.append)
        assert offer is not None
        return offer

    async def take(self, offer: LocalSocketOffer | TcpOffer) -> DraftSocket:
        if isinstance(offer, LocalSocketOffer):
            return await asyncio.to_thread(connect_local_socket, offer, self.terms, timeout_s=5)
        return await asyncio.to_thread(connect_tcp, offer, self.tls, timeout_s=5)

    def connected(self) -> socket.socket:
        """A stranger."""
        if isinstance(self.door, LocalDoor):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(abstract_address(self.door.name))
        else:
            offer = self.door.offer(b"")
            connection = socket.create_connection(split_address(offer.address))
        connection.settimeout(10)
        return connection


@pytest.fixture(params=["local_socket", "tcp", "tls"])
async def entrance(request: pytest.FixtureRequest, draft: Any, tmp_path: Path) -> Any:
    tls = PLAINTEXT
    if request.param == "tls":
        tls = CertificateAuthority(tmp_path).mutual("service")
    opened = Entrance(request.param, draft.terms, ServerSettings(tls=tls))
    opened.listener.start()
    yield opened
    opened.listener.close()
    for peer in opened.peers:
        peer.connection.close()


async def ended(connection: socket.socket) -> bool:
    """Whether it has, maybe after TLS has told why."""
    with connection:
        try:
            while await asyncio.to_thread(connection.recv, 4096):
                pass
        except ConnectionResetError:
            pass
        return True


async def test_a_token_is_good_for_one_connection(entrance: Entrance) -> None:
    offer = entrance.offer()
    connected = await entrance.take(offer)
    with pytest.raises(UnavailableError, match=r"was not accepted|reset by peer"):
        await entrance.take(offer)
    assert len(entrance.peers) == 1
    connected.connection.close()


async def test_a_token_dies_with_its_stream(entrance: Entrance) -> None:
    offer = entrance.offer()
    entrance.listener.withdraw(offer.token)
    with pytest.raises(UnavailableError, match=r"was not accepted|reset by peer"):
        await entrance.take(offer)
    assert entrance.peers == []


@pytest.mark.parametrize("shown", [b"x" * 32, b"x" * 33, b"\x16\x03" + b"\xff" * 400])
async def test_whoever_shows_something_else_is_sent_away(shown: bytes, entrance: Entrance) -> None:
    entrance.offer()
    stranger = entrance.connected()
    stranger.send(shown)
    assert await ended(stranger)
    assert entrance.peers == []


async def test_strangers_are_few_and_have_little_time(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch, draft: Any, stack: AsyncExitStack
) -> None:
    strangers = entrance.listener._strangers
    monkeypatch.setattr("draft_service.socket_listener._MAX_STRANGERS", 2)
    silent = [stack.enter_context(entrance.connected()) for _ in range(2)]
    await draft.eventually(lambda: len(strangers) == 2)
    assert await ended(entrance.connected())
    assert len(strangers) == 2
    silent[0].close()
    await draft.eventually(lambda: len(strangers) == 1)
    monkeypatch.setattr("draft_service.socket_listener._TOKEN_S", 0.05)
    assert await ended(entrance.connected())
    assert len(strangers) == 1
    entrance.listener.close()
    assert await ended(silent[1])
    assert entrance.listener.offer(entrance.peers.append) is None


async def test_a_stranger_that_leaves_is_forgotten(entrance: Entrance, draft: Any) -> None:
    entrance.connected().close()
    await draft.eventually(lambda: len(entrance.listener._strangers) == 0)
    connected = await entrance.take(entrance.offer())
    connected.connection.close()


# TCP only.


async def test_a_token_may_come_in_pieces(draft: Any) -> None:
    entrance = Entrance("tcp", draft.terms, ServerSettings())
    entrance.listener.start()
    token = entrance.offer().token
    with entrance.connected() as slow:
        for part in (token[:1], token[1:31], token[31:]):
            slow.send(part)
            if part != token[31:]:
                await asyncio.sleep(0)
        assert await asyncio.to_thread(slow.recv, 1) == b"\x01"
    entrance.peers[0].connection.close()
    entrance.listener.close()


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({"host": "::1"}, "[::1]:{port}"),
        ({"host": "0.0.0.0", "advertise_host": "10.0.0.7"}, "10.0.0.7:{port}"),
        ({"host": "::", "advertise_host": "pod-3"}, "pod-3:{port}"),
    ],
)
async def test_the_address_is_this_very_services(
    settings: dict[str, str], address: str, draft: Any
) -> None:
    door = TcpDoor(ServerSettings(**settings), 0)
    listening = door.listen()
    with listening:
        port = listening.getsockname()[1]
        assert door.offer(b"").address == address.format(port=port)
        if settings["host"] == "::":
            socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(StartupError, match=f"cannot listen on .*{port} for steps"):
            TcpDoor(ServerSettings(**settings), port).listen()


async def test_certificates_that_cannot_be_used_are_a_startup_error(tmp_path: Path) -> None:
    tls = TlsSettings(tls_certificate=str(tmp_path / "no"), tls_private_key=str(tmp_path / "no"))
    with pytest.raises(ConfigError, match="tls_certificate"):
        TcpDoor(ServerSettings(tls=tls), 0)


# TLS: as gRPC has it, in both directions, or not at all.


@pytest.fixture
async def secured(draft: Any, tmp_path: Path) -> Any:
    authority = CertificateAuthority(tmp_path)
    opened = Entrance("tcp", draft.terms, ServerSettings(tls=authority.mutual("service")))
    opened.listener.start()
    yield opened, authority
    opened.listener.close()


@pytest.mark.parametrize("wrong", ["plaintext", "no certificate", "another authority", "a name"])
async def test_whoever_the_certificates_do_not_let_in_stays_outside(
    wrong: str, secured: Any, tmp_path: Path
) -> None:
    entrance, authority = secured
    if wrong == "plaintext":
        entrance.tls = PLAINTEXT
    elif wrong == "no certificate":
        entrance.tls = TlsSettings(tls_server_ca=authority.path)
    elif wrong == "another authority":
        (tmp_path / "other").mkdir()
        entrance.tls = CertificateAuthority(tmp_path / "other").mutual("client")
    else:
        entrance.tls = authority.mutual("client", server_name="somebody.else")
    offer = entrance.offer()
    with pytest.raises(UnavailableError, match=f"tcp {offer.address}"):
        await entrance.take(offer)
    assert entrance.peers == []


async def test_nothing_is_told_to_a_service_without_tls_by_a_worker_with_it(
    draft: Any, tmp_path: Path
) -> None:
    authority = CertificateAuthority(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)
        offer = TcpOffer(f"127.0.0.1:{listening.getsockname()[1]}", b"secret token" * 3)
        connecting = asyncio.ensure_future(
            asyncio.to_thread(connect_tcp, offer, authority.mutual("worker"), timeout_s=5)
        )
        connection, _ = await asyncio.to_thread(listening.accept)
        with connection:
            heard = await asyncio.to_thread(connection.recv, 1 << 16)
            connection.sendall(b"\x01")
        with pytest.raises(UnavailableError):
            await connecting
        assert b"secret" not in heard


async def test_steps_travel_over_mutual_tls(draft: Any, tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    tls = authority.mutual("everybody")
    async with (
        draft.service(tls=tls) as service,
        draft.target(service.address, wire="tcp", tls=tls) as target,
    ):
        await target.connected()
        (answer,) = await target.step(draft.task("a", 0, [1, 2]))
        assert answer.token_ids == (3, 4, 5)
        stream = target.drafting._stream
        assert stream.wire == "tcp"
        # Many records in, more than the socket has room for; many records out.
        service.proposer.answer = lambda task: type(answer)((1,) * 20000, (0.5,) * 20000)
        names = [f"{number:0200}" for number in range(4096)]
        large = stream.begin_step([draft.task("a", 2, [3])], names)
        assert await asyncio.to_thread(large.wait, 20)
        assert len(large.answered.answers[0].token_ids) == 20000
        assert len(service.proposer.dropped) == 4096
        await service.server.drain()
        await target.away()
