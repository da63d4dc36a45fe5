"""A DockerAgent in this process, on real sockets, before a dockerd that the test plays itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop

from runtime_proxy import options
from runtime_proxy.docker.agent import DockerAgent
from runtime_proxy.status import Figures
from tests.runtime_proxy.scripted import ScriptedServer, ScriptedServers

INFO = b'{"CgroupDriver":"cgroupfs"}'


GET = b"GET /version HTTP/1.1\r\nHost: d\r\n\r\n"
EVENTS = b"GET /events HTTP/1.1\r\nHost: d\r\n\r\n"
ATTACH = b"POST /containers/c/attach HTTP/1.1\r\nHost: d\r\n\r\n"
RAW = b"HTTP/1.1 200 OK\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"
SANDBOX = b'{"Labels":{"io.kubernetes.docker.type":"podsandbox"},"HostConfig":{}}'
CREATE = (
    b"POST /containers/create?name=k8s_POD_p_n_u_0 HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s"
    % (
        len(SANDBOX),
        SANDBOX,
    )
)


@dataclass(frozen=True)
class End:
    """One end of a connection, as the test holds it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    early: bytearray = field(default_factory=bytearray)
    """What was read before the test looked."""

    def send(self, octets: bytes) -> None:
        self.writer.write(octets)

    def end_output(self) -> None:
        self.writer.write_eof()

    async def receive(self, octets: bytes) -> None:
        """Read as many octets as these, and require that they are these."""
        missing = max(0, len(octets) - len(self.early))
        self.early.extend(await self.reader.readexactly(missing))
        received = bytes(self.early[: len(octets)])
        del self.early[: len(octets)]
        assert received == octets

    async def rest(self) -> bytes:
        """Return what comes until the other end sends no more."""
        return bytes(self.early) + await self.reader.read()


@dataclass
class Bed:
    """The agent, and dockerd's ends of its connections in the order in which they came."""

    folder: Path
    agent: DockerAgent
    accepted: asyncio.Queue[End] = field(default_factory=asyncio.Queue)
    asked: list[str] = field(default_factory=list)
    answers: dict[str, bytes] = field(default_factory=lambda: {"/info": INFO})
    """JSON that the agent's own questions get, by their targets; `asked` are those targets."""

    @property
    def backend(self) -> Path:
        return self.folder / "docker.sock"

    async def dockerd(self) -> asyncio.Server:
        """Listen as dockerd."""
        return await asyncio.start_unix_server(self._accept, self.backend)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.read(65_536)
        if b"Connection: close" not in head:
            self.accepted.put_nowait(End(reader, writer, bytearray(head)))
            return
        target = head.split(b" ")[1].decode()
        self.asked.append(target)
        if (body := self.answers.get(target)) is None:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async def client(self) -> End:
        """Connect as a client, and return its end."""
        return End(*await asyncio.open_unix_connection(self.folder / "proxy.sock"))

    async def pair(self, request: bytes) -> tuple[End, End]:
        """Return a client's end and dockerd's, where this request has arrived."""
        client = await self.client()
        client.send(request)
        dockerd = await self.accepted.get()
        await dockerd.receive(request)
        return client, dockerd

    def hook(self, *servers: ScriptedServer) -> None:
        self.agent.hooks.hooks.servers = cast(Any, ScriptedServers(*servers))


def run(
    folder: Path, test: Callable[[Bed], Awaitable[None]], *, flags: tuple[str, ...] = ()
) -> None:
    """Run a test with an agent that listens and a dockerd that accepts."""

    async def main() -> None:
        async with asyncio.timeout(10):
            bed = bed_in(folder, *flags)
            loop = asyncio.get_running_loop()
            serving = await loop.create_unix_server(
                bed.agent.new_connection, str(folder / "proxy.sock")
            )
            async with await bed.dockerd(), serving:
                try:
                    await test(bed)
                finally:
                    for connection in list(bed.agent.connections):
                        connection.close()
                    await bed.agent.close()

    uvloop.run(main())


def bed_in(folder: Path, *flags: str) -> Bed:
    chosen = options.parse(
        [
            "--backend-runtime-mode=Docker",
            f"--remote-runtime-service-endpoint={folder / 'docker.sock'}",
            f"--hook-server-dir={folder / 'hooks'}",
            "--state-dir=",
            *flags,
        ]
    )
    return Bed(folder, DockerAgent(chosen, Figures(asyncio.get_running_loop().time)))


def gauge(bed: Bed, name: str) -> float:
    (found,) = [one for one in bed.agent.gauges if one.name == f"koord_runtime_proxy_{name}"]
    return found.read()
