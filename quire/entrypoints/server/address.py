"""The address that a server listens on: a TCP port or a Unix socket, with HTTPS or without.

`launch` binds it before the model is loaded and listens once the engine is ready.
"""

import contextlib
import os
import resource
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from uvicorn.config import create_ssl_context

from quire.entrypoints.server.options import ServerArgs
from quire.errors import ConfigError, QuireError

_MAX_FILES = 65536


@contextlib.contextmanager
def bound_socket(args: ServerArgs) -> Iterator[socket.socket]:
    """The socket of the options, bound and not yet listening; a Unix socket is removed at the end.

    Raises:
        ConfigError: there is no such host.
        QuireError: the address is taken.
    """
    with _bind_path(args.uds) if args.uds else _bind_port(args) as listener:
        try:
            yield listener
        finally:
            if args.uds:
                Path(args.uds).unlink(missing_ok=True)


def raise_file_limit() -> None:
    """As many open files, that is connections, as the system lets us have."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if most == resource.RLIM_INFINITY else min(most, _MAX_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _bind_port(args: ServerArgs) -> socket.socket:
    host = args.host or "0.0.0.0"
    try:
        # IPv4 where a name has both, as localhost mostly does: the system's order has IPv6 first.
        family, *_, address = min(socket.getaddrinfo(host, args.port, type=socket.SOCK_STREAM), key=lambda one: one[0])
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r:.80} is not known ({getattr(error, 'strerror', error)}).") from None
    # With the protocol named, or else asyncio leaves Nagle's algorithm on: a stream's events would wait for each other.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # A client that vanished without a word is noticed after some two minutes.
    for name, value in (("SO_KEEPALIVE", 1), ("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
        if hasattr(socket, name):
            listener.setsockopt(level, getattr(socket, name), value)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = f"{error.strerror}. Stop what uses it, or choose another --port or --host."
        raise QuireError(f"can't listen on {host} port {args.port}: {reason}") from None
    return listener


def _bind_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            _remove_stale(path)
        mask = os.umask(0o177)  # the socket is this user's only, from its first moment
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
    except OSError as error:
        listener.close()
        raise QuireError(f"can't listen on the Unix socket {path}: {error.strerror or error}.") from None
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket of a server that is gone; one that is served stays, and binding it fails."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def describe_address(listener: socket.socket, args: ServerArgs) -> str:
    """Where people find the server."""
    if args.uds:
        return f"the Unix socket {args.uds}"
    host, port = listener.getsockname()[:2]
    open_to = "all interfaces" if args.api_key else "all interfaces, and no API key"
    note = f"{open_to}; " if host in ("0.0.0.0", "::") else ""
    shown = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host
    scheme = "http" if args.ssl_certfile is None else "https"
    docs = "" if args.disable_fastapi_docs else f"docs: {args.root_path}/docs, "
    return f"{scheme}://{shown}:{port}{args.root_path} ({note}{docs}playground: {args.root_path}/)"


def ssl_context(args: ServerArgs) -> ssl.SSLContext | None:
    """What HTTPS needs, where the options ask for it.

    Raises:
        ConfigError: a file can't be used.
    """
    if args.ssl_certfile is None:
        return None
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        if (path := getattr(args, name)) and not os.access(path, os.R_OK):
            raise ConfigError(f"{name} {path!r} is not there, or can't be read by this user; name a PEM file.")
    files, asked = (args.ssl_certfile, args.ssl_keyfile), (args.ssl_cert_reqs, args.ssl_ca_certs, args.ssl_ciphers)
    try:
        return create_ssl_context(*files, None, ssl.PROTOCOL_TLS_SERVER, *asked)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or str(error)
        raise ConfigError(f"ssl_certfile, ssl_keyfile, ssl_ca_certs or ssl_ciphers can't be used: {reason}.") from None
