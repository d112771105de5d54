"""HTTP requests over aiohttp's connections.

A session of aiohttp prepares a request once: address, headers, proxy, passwords. Its connector opens and keeps the
connections, and its parser reads from them. What a session does anew for each request falls away, which is more than
half of what a request costs.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress
from contextvars import ContextVar
from functools import partial

import aiohttp
import yarl
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.http import HttpProcessingError, RawResponseMessage

from ..errors import MalformedError, ModelError, TimedOutError, UnreachableError
from .pacing import CrowdedError

CONNECTING = 10.0  # seconds to reach a server
KEPT = 4.0  # seconds that an idle connection is kept: less than most servers keep it
TIMES = aiohttp.ClientTimeout(total=None, sock_connect=CONNECTING)
LENGTH = "content-length"
DRAINING = 0.05  # seconds to wait for the end of a body whose last event was read
FAULTS = (aiohttp.ClientError, HttpProcessingError, OSError, ValueError, EOFError, RecursionError)
FILES = "Lower concurrency=, or raise the limit by `ulimit -n`."
FRAMING = (LENGTH, "transfer-encoding")


class Wire:
    """How a request went out: over a connection ``opened`` for it, or over one that was kept."""

    __slots__ = ("opened",)

    def __init__(self) -> None:
        self.opened = False


WIRE: ContextVar[Wire | None] = ContextVar("WIRE", default=None)


def opened(address: aiohttp.AddrInfoType) -> socket.socket:
    """A new socket, noted as such for the request that needs it."""
    if (wire := WIRE.get()) is not None:
        wire.opened = True
    return socket.socket(*address[:3])


def session(headers: dict[str, str], trust_env: bool) -> aiohttp.ClientSession:
    """Connections without a limit, cookies or redirects."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT, ttl_dns_cache=60, socket_factory=opened),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        timeout=TIMES,
        trust_env=trust_env,
    )


class Response:
    """The beginning of an answer. Its connection serves again when the body was read, and is closed when that is left."""

    __slots__ = ("_connection", "content", "headers", "path", "status")

    def __init__(self, path: str, connection: Connection, message: RawResponseMessage, content: aiohttp.StreamReader) -> None:
        self.path, self._connection = path, connection
        self.status, self.headers, self.content = message.code, message.headers, content
        content.on_eof(connection.release)

    @property
    def length(self) -> int | None:
        """The bytes of the body, as far as the headers say."""
        told = self.headers.get(LENGTH)
        return None if told is None else int(told)

    def close(self, reason: Exception | None = None) -> None:
        """Read no more. Who waits for more is told the reason."""
        if not self.content.is_eof():
            self.content.set_exception(reason or aiohttp.ClientConnectionError("closed by us"))
        self._connection.close()


class Watch:
    """Closes a response that is silent for too long, or not over in time. It runs while we read."""

    def __init__(self, response: Response, until: float, reason: Exception) -> None:
        self._until, self._close = until, partial(response.close, reason)
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_at(until, self._close)

    def start(self, idle: float) -> None:
        """Bear a silence of ``idle`` seconds from now on."""
        self._handle = self._loop.call_at(min(self._loop.time() + idle, self._until), self._close)

    def stop(self) -> None:
        """Bear anything."""
        self._handle.cancel()


async def drain(response: Response) -> None:
    """Wait a moment for the end of a body, so that its connection can serve again."""
    with suppress(TimeoutError, *FAULTS):
        async with asyncio.timeout(DRAINING):
            async for _ in response.content.iter_any():
                pass


class Kept(Exception):
    """The request was prepared, and not sent."""


class Prepared:
    """A request but for its body."""

    def __init__(self, request: ClientRequest, connector: aiohttp.BaseConnector) -> None:
        self._request, self._connector, self._head = request, connector, b""

    @classmethod
    async def of(cls, session: aiohttp.ClientSession, method: str, url: yarl.URL, **headers: str) -> Prepared:
        """What ``session`` makes of it."""
        made: list[ClientRequest] = []

        async def keep(request: ClientRequest, _: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
            made.append(request)
            raise Kept

        with suppress(Kept):
            await session.request(method, url, headers=headers, middlewares=(keep,))
        assert session.connector is not None
        return cls(made[0], session.connector)

    async def send(self, body: bytes) -> Response:
        """Send it, and wait for the beginning of the answer."""
        connection = await self._connected()
        try:
            protocol, transport = connection.protocol, connection.transport
            if protocol is None or transport is None:
                raise aiohttp.ServerDisconnectedError
            protocol.set_response_params(read_until_eof=True, auto_decompress=False)  # aiohttp's own has no limit
            transport.write(self._headed(body))
            return Response(self._request.url.path, connection, *await begun(protocol))
        except BaseException:
            connection.close()
            raise

    async def _connected(self) -> Connection:
        try:
            return await self._connector.connect(self._request, [], TIMES)
        except TimeoutError:
            raise aiohttp.ConnectionTimeoutError from None

    def _headed(self, body: bytes) -> bytes:
        """``body`` with its head."""
        self._head = self._head or self._written()  # only now: a proxy's password comes with its connection
        length = b"" if self._request.method == "GET" else b"Content-Length: %d\r\n" % len(body)
        return b"%s%s\r\n%s" % (self._head, length, body)

    def _written(self) -> bytes:
        asked = self._request
        target = asked.url if asked.proxy and not asked.is_ssl() else asked.url.raw_path_qs
        fields = [f"{name}: {value}" for name, value in asked.headers.items() if name.lower() not in FRAMING]
        return "\r\n".join([f"{asked.method} {target} HTTP/1.1", *fields, ""]).encode()


async def begun(protocol: ResponseHandler) -> tuple[RawResponseMessage, aiohttp.StreamReader]:
    """The head of the answer, after notices (1xx) that it is on its way."""
    while True:
        message, content = await protocol.read()
        if message.code >= 200 or message.code == 101:
            return message, content


def unheard(error: Exception) -> bool:
    """Whether a connection broke before any byte of an answer came."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)  # else it is the part of an answer that did come
    return isinstance(error, aiohttp.ClientOSError) and not isinstance(error, aiohttp.ClientConnectorError)


def fault(error: Exception, place: str, seconds: float) -> ModelError:
    """Our error for one of the connection to ``place``. It does not keep the original, which may hold the key."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return CrowdedError(f"no connection to {place}: this process may not open more files", hint=FILES)
    match error:
        case aiohttp.ConnectionTimeoutError():
            return UnreachableError(f"no connection to {place} within {CONNECTING:g} s")
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            return UnreachableError(f"no secure connection to {place} ({type(error).__name__})", retryable=False)
        case aiohttp.ClientConnectorDNSError():
            return UnreachableError(f"no connection to {place}: its name is not known")
        case aiohttp.ClientConnectorError(os_error=ConnectionRefusedError()):
            return UnreachableError(f"nothing listens at {place}")
        case aiohttp.ClientConnectorError():
            return UnreachableError(f"no connection to {place}: {error.os_error.strerror}")
        case TimeoutError():
            return TimedOutError(f"{place} did not answer within {seconds:g} s")
        case OSError() | EOFError() | aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError():
            return UnreachableError(f"the connection to {place} broke before the answer was complete ({type(error).__name__})")
    return MalformedError(f"{place} does not speak HTTP as it should ({type(error).__name__})")
