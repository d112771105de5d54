"""Where a model is asked, and as whom."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit, urlunsplit

from ..requests import digest
from .masking import Mask, Secret

OPENAI = "https://api.openai.com/v1"
PATHS = {"chat": "/chat/completions", "completions": "/completions"}
TOKEN = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
DEPLOYED = re.compile(r"/deployments/[^/]+(?=/|$)")
TELLING = re.compile(r"key|token|secret|sig|auth|pass|cookie|credential", re.IGNORECASE)


class Azure(NamedTuple):
    """How Azure names a model: by the version of its interface, and the deployment."""

    version: str
    deployment: str

    def address(self, base: str) -> str:
        """The deployment's address, under that of the resource or of the deployment itself."""
        parts = urlsplit(base.strip())
        path = parts.path.rstrip("/")
        if "/deployments/" not in path:
            path = f"{path.removesuffix('/openai')}/openai/deployments/{quote(self.deployment, safe='')}"
        query = [(name, value) for name, value in parse_qsl(parts.query) if name != "api-version"]
        return parts._replace(path=path, query=urlencode([*query, ("api-version", self.version)])).geturl()


def given_address(base_url: str | None, azure: Azure | None) -> str:
    """Where to ask: what was given, else what the environment says."""
    named = os.environ.get("AZURE_OPENAI_ENDPOINT") if azure else None
    base = base_url if base_url is not None else named or os.environ.get("OPENAI_BASE_URL") or OPENAI
    return azure.address(base) if azure else base


def beside(path: str) -> str:
    """What the files and batches of an endpoint stand under: they belong to no deployment.

    >>> beside("/v1/chat/completions"), beside("/openai/deployments/gpt/chat/completions")
    ('/v1', '/openai')
    """
    return DEPLOYED.sub("", next(path.removesuffix(end) for end in PATHS.values() if path.endswith(end)))


def given_key(api_key: str | None, azure: Azure | None) -> str:
    """The key: what was given, else what the environment says."""
    named = os.environ.get("AZURE_OPENAI_API_KEY") if azure else None
    key = api_key if api_key is not None else named or os.environ.get("OPENAI_API_KEY", "")
    if not isinstance(key, str):
        raise TypeError(f"api_key= is {type(key).__name__}; it takes a text")
    return key


class Account:
    """The address of an endpoint and what is shown to it. No secret of it is seen from outside.

    ``place`` is the address without secrets, for messages and for keys of the store; ``route`` is what a batch calls the
    endpoint; ``name`` tells accounts apart, and ``customer`` who asks whom, whatever for.
    """

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        endpoint: str,
        headers: Mapping[str, str],
        azure: Azure | None = None,
    ) -> None:
        base = given_address(base_url, azure)
        shown_key = keyed(given_key(api_key, azure), azure)
        parts = checked(base)
        root = parts.path.rstrip("/").removesuffix(PATHS[endpoint])
        path = root + PATHS[endpoint]
        shown = [(name, value) for name, value in parse_qsl(parts.query) if not TELLING.search(name)]
        self.route = PATHS[endpoint] if DEPLOYED.search(root) else f"/v1{PATHS[endpoint]}"
        self.place = urlunsplit((parts.scheme, parts.netloc, path, urlencode(shown), ""))
        self.origin = urlunsplit((parts.scheme, parts.netloc, "", "", ""))
        self.url = Secret(urlunsplit((parts.scheme, parts.netloc, path, parts.query, "")))
        self.headers = {**shown_key, **{name: Secret(checked_header(name, value)) for name, value in headers.items()}}
        self.mask = Mask([*self._secrets(), *(Secret(value) for name, value in parse_qsl(parts.query) if TELLING.search(name))])
        shown_to = sorted((name, value.reveal()) for name, value in self.headers.items())
        self.name = digest([self.url.reveal(), shown_to])
        self.customer = digest([parts.netloc, root, parts.query, shown_to])
        self.keyless = not self.headers and self.origin == "https://api.openai.com"
        warn_if_bare(parts.scheme, parts.hostname or "", bool(self.headers))

    def _secrets(self) -> list[Secret]:
        """The values of headers, and what follows "Bearer" in them."""
        values = [value.reveal() for name, value in self.headers.items() if TELLING.search(name)]
        return [Secret(word) for value in values for word in {value, value.rpartition(" ")[2]}]

    def __repr__(self) -> str:
        return f"<account at {self.place}>"


def checked(base_url: str) -> SplitResult:
    """The parts of an address, if it is one."""
    parts = urlsplit(base_url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("base_url= is not an address that starts with http:// or https://, like http://localhost:8000/v1")
    if not parts.geturl().isprintable() or " " in parts.geturl():
        raise ValueError("base_url= holds a space or another character that no address has")
    if "@" in parts.netloc:
        raise ValueError("base_url= holds a user name or password; pass api_key= or headers= instead")
    return parts


def checked_header(name: str, value: str) -> str:
    """A header's value, if it and the name may be those of one."""
    if not TOKEN.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a header (RFC 9110: letters, digits and some signs, no space or colon)")
    if not isinstance(value, str) or not value.isascii() or not value.isprintable():
        raise ValueError(f"the value for {name} is not a line of plain ASCII text (it is not shown, as it may be a secret)")
    return value


def keyed(key: str, azure: Azure | None) -> dict[str, Secret]:
    """The header that shows a key."""
    key = checked_header("api_key", key.strip())
    if not key:
        return {}
    return {"api-key": Secret(key)} if azure else {"Authorization": Secret(f"Bearer {key}")}


def warn_if_bare(scheme: str, host: str, secret: bool) -> None:
    """Warn where a key would travel in the open."""
    if scheme == "http" and secret and not is_loopback(host):
        warnings.warn(f"the API key is sent to {host} without encryption; use https://", UserWarning, stacklevel=4)


def is_loopback(host: str) -> bool:
    """Whether the address is this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
