"""The server process: listen, and shut down gracefully."""

from __future__ import annotations

import gc
import math
import signal
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import uvicorn

CONNECTIONS = 1024
"""Maximum number of connections; further ones are refused."""


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 picks a free one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        # With an explicit protocol, asyncio sends small answers at once instead of waiting 40 ms for more.
        listening = socket.socket(family, kind, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(CONNECTIONS)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on host={host!r} and port={port}: {reason}") from error
    return listening


def is_loopback(listening: socket.socket) -> bool:
    """Return whether only this machine can connect."""
    return ip_address(str(listening.getsockname()[0])).is_loopback


def run(app: Callable[..., Any], listening: socket.socket, seconds: float) -> None:
    """Serve until SIGTERM or SIGINT; running requests then get this many seconds to finish."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=math.ceil(seconds) + 1,
    )  # fmt: skip
    gc.collect()
    gc.freeze()  # loaded objects stay; collecting them would delay requests by 0.2 s
    signals = (signal.SIGTERM, signal.SIGINT)
    # uvicorn shuts down and then raises the signal again for the previous handler; ignore it.
    before = [signal.signal(each, lambda *_: None) for each in signals]
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
