"""The process of the server: it listens, and ends in order."""

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
"""The most connections at a time; a further one is refused."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any free one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        # With the protocol named, asyncio sends small answers at once instead of waiting 40 ms for more.
        listening = socket.socket(family, kind, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(CONNECTIONS)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"host={host!r} and port={port} cannot be listened at: {reason}") from error
    return listening


def is_loopback(listening: socket.socket) -> bool:
    """Return whether only this machine can connect."""
    return ip_address(str(listening.getsockname()[0])).is_loopback


def run(app: Callable[..., Any], listening: socket.socket, seconds: float) -> None:
    """Answer until SIGTERM or SIGINT; what is under way then is finished, for so many seconds at most."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=math.ceil(seconds) + 1,
    )  # fmt: skip
    gc.collect()
    gc.freeze()  # what is loaded now stays; looking through it for garbage would hold up requests for 0.2 s
    signals = (signal.SIGTERM, signal.SIGINT)
    # uvicorn ends in order and then raises the signal once more, for whoever was there before: nobody.
    before = [signal.signal(each, lambda *_: None) for each in signals]
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
