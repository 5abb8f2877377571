"""HTTP application: routes, error responses and pages."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import math
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multitudes.evaluation.calibrate import Calibrated
from multitudes.lab.data.new_inputs import Inputs
from multitudes.lab.report.chart import render, resource
from multitudes.lab.serve.batching import Batcher, QueueFull
from multitudes.lab.serve.held_out import columns_of, examples
from multitudes.lab.serve.openapi import ABOUT, HEALTH, METRICS, PREDICT
from multitudes.lab.serve.prometheus import ServerMetrics
from multitudes.lab.serve.requests import Limits, Refused, read_request
from multitudes.lab.serve.served_network import Answers, Question, ServedNetwork

HERE = "multitudes.lab.serve"
log = logging.getLogger(HERE)

READERS = 4
"""Number of bodies parsed concurrently, since decoded images may be large."""
LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""Host names of this machine in a browser."""
BATCH = 256
"""Maximum rows per batch, as in `multitudes predict`."""


def create_app(network: ServedNetwork, **options: Any) -> FastAPI:
    """Create the application that serves a network, with the options of `Server`."""
    server = Server(network, **options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.close()

    app = FastAPI(
        title="multitudes serve", version=metadata.version("multitudes"), docs_url=None, redoc_url=None,
        lifespan=lifespan, description="Predictions of a trained network, with their uncertainty.",
    )  # fmt: skip
    app.add_api_route("/predict", server.predict, methods=["POST"], openapi_extra=PREDICT, summary="Predict inputs")
    app.add_api_route("/about", server.about, openapi_extra=ABOUT, summary="Describe the network, with examples")
    app.add_api_route("/health", server.health, openapi_extra=HEALTH, summary="Check that the server runs")
    app.add_api_route("/metrics", server.metrics_text, openapi_extra=METRICS, summary="Metrics for Prometheus")
    app.add_api_route("/", server.page, include_in_schema=False)
    app.add_api_route("/docs", lambda: _page("docs.html", openapi=app.openapi()), include_in_schema=False)
    app.add_exception_handler(Refused, _refusal)
    app.add_exception_handler(HTTPException, _refusal)
    app.add_middleware(RequestMiddleware, metrics=server.metrics)
    return app


class Server:
    """Shared state of the routes, with a method for each.

    `level` is the default level of sets and intervals, `token` the token that requests must send, `wait` the seconds
    that a batch waits for incoming requests. A `local` server without a token accepts only local host names, against
    DNS rebinding.
    """

    def __init__(
        self, network: ServedNetwork, *, level: float = 0.95, limits: Limits | None = None, token: str | None = None,
        local: bool = False, wait: float = 0.003,
    ) -> None:  # fmt: skip
        self.network, self.level, self.limits, self.token = network, level, limits or Limits(), token
        self.hosts = LOCAL if local and token is None else None
        self.metrics = ServerMetrics()
        self.batcher: Batcher[Question, Answers] = Batcher(
            network.answer, rows=BATCH, wait=wait, waiting=4 * max(BATCH, self.limits.rows), watch=self.metrics.batch
        )
        self.readers = ThreadPoolExecutor(READERS, "readers")
        self.running = 0
        self._about = self._described()

    def close(self) -> None:
        """Finish running requests, and end the threads."""
        self.batcher.close()
        self.readers.shutdown()

    # -- routes ------------------------------------------------------------------------------------------------

    async def predict(self, request: Request) -> Response:
        """Answer the inputs of a request."""
        self._authorise(request)
        level = _level(request, self.level)
        if self.running >= self.limits.requests:
            raise Refused(f"{self.limits.requests} requests are running, try again in a second", 503)
        self.running += 1
        try:
            async with asyncio.timeout(self.limits.seconds):
                inputs, answers = await self._answered(request, level)
        except TimeoutError as error:
            raise Refused(f"the request took longer than {self.limits.seconds:g} seconds", 504) from error
        finally:
            self.running -= 1
        more = {"level": level, "conformal": self.network.has_conformal, "notes": inputs.notes}
        return _json({"answers": answers, **more})

    async def about(self, request: Request) -> Response:
        """Describe the network, its inputs, and examples."""
        self._authorise(request)
        return _json(self._about)

    async def health(self) -> Response:
        """Confirm that the server runs."""
        return _json({"status": "ok"})

    async def metrics_text(self, request: Request) -> Response:
        """Return the server's metrics."""
        self._authorise(request)
        return Response(
            self.metrics.text(self.running, self.batcher.waiting),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def page(self) -> Response:
        """Return the interactive page, which loads its content from `/about`."""
        return _page("page.html", script=resource("templates/page.js", HERE))

    # -- helpers -----------------------------------------------------------------------------------------------

    def _authorise(self, request: Request) -> None:
        host = request.headers.get("host", "").lower()
        if self.hosts is not None and (name := re.sub(r":\d*$", "", host)) not in self.hosts:
            raise Refused(f"without a token, the header Host must be one of {', '.join(self.hosts)}, got {name!r}", 403)
        if self.token is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token.encode()):
            raise Refused("the header Authorization must be 'Bearer TOKEN', with the token of this server", 401)

    async def _answered(self, request: Request, level: float) -> tuple[Inputs, Answers]:
        body = await _body(request, self.limits.size)
        kind = request.headers.get("content-type", "")
        with self.batcher.expecting():
            inputs = await asyncio.get_running_loop().run_in_executor(
                self.readers, read_request, body, kind, self.network.data, self.limits
            )
            try:
                future = self.batcher.submit(Question(inputs.x, level), len(inputs.x))
            except QueueFull as error:
                raise Refused("too many rows are waiting, try again in a second", 503) from error
        return inputs, await asyncio.wrap_future(future)

    def _described(self) -> dict[str, Any]:
        network, data = self.network, self.network.data
        return {
            "job": network.trained.job.name,
            "method": (network.trained.job.config or {}).get("method"),
            "data": data.name,
            "inputs": data.kind.inputs,
            "shape": list(data.shape),
            "classes": list(data.classes),
            "columns": columns_of(data),
            "members": network.members,
            "draws": network.draws,
            "level": self.level,
            "calibrated": isinstance(network.trained.net, Calibrated),
            "conformal": network.has_conformal,
            "limits": {"bytes": self.limits.size, "rows": self.limits.rows, "seconds": self.limits.seconds},
            "runs": network.description,
            "examples": examples(data, network.held_out),
        }


async def _body(request: Request, most: int) -> bytes:
    """Read the body, up to the size limit."""
    length = request.headers.get("content-length", "")
    body = bytearray()
    try:
        if length.isdigit() and int(length[:20]) > most:
            raise Refused(f"the body must have {most:,} bytes at most, got {int(length[:20]):,}", 413)
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise Refused(f"the body must have {most:,} bytes at most, got more", 413)
    except ClientDisconnect as error:
        raise Refused("the request ended before its body was complete", 400) from error
    return bytes(body)


def _level(request: Request, default: float) -> float:
    if more := [name for name in request.query_params if name != "level"]:
        raise Refused(f"the only query parameter is level, got {more[0]!r}")
    given = request.query_params.get("level")
    try:
        level = default if given is None else float(given)
    except ValueError:
        level = math.nan
    if not 0 < level < 1:
        raise Refused(f"level must lie between 0 and 1, got {given!r}")
    return level


# -- responses ---------------------------------------------------------------------------------------------


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Encode as ASCII JSON, so that lone surrogates from a request cannot break the answer."""
    return Response(json.dumps(content, allow_nan=False), status, headers, "application/json")


def _page(template: str, **values: Any) -> Response:
    """Render a page that loads no external resources; only its own style sheet and script may run."""
    html = render(template, HERE, css=resource("page.css") + resource("templates/serve.css", HERE), **values)
    return Response(html, headers={"Content-Security-Policy": _policy(html)}, media_type="text/html")


@cache
def _policy(html: str) -> str:
    allowed = {
        name: " ".join(f"'sha256-{_digest(text)}'" for text in re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL))
        for name, tag in (("style-src", "style"), ("script-src", "script"))
    }
    own = "; ".join(f"{name} {digests or repr('none')}" for name, digests in allowed.items())
    rest = "connect-src 'self'; img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {own}; {rest}"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


async def _refusal(request: Request, error: Exception) -> Response:
    if isinstance(error, Refused):
        return _json({"error": error.sentence}, error.status, REFUSED_WITH.get(error.status))
    assert isinstance(error, HTTPException)
    sentences = {
        404: f"unknown path {request.url.path!r}: see /docs",
        405: f"{request.url.path!r} does not accept {request.method}: see /docs",
    }
    sentence = sentences.get(error.status_code, str(error.detail))
    return _json({"error": sentence}, error.status_code, dict(error.headers or {}))


class RequestMiddleware:
    """Middleware that counts and times requests, adds headers, and turns unexpected errors into responses."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, start = 0, time.perf_counter()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                failed = _json({"error": "internal error; see the server's log"}, 500)
                await failed(scope, receive, sending)
        finally:
            path = scope["path"] if scope["path"] in PATHS else "other"
            self.metrics.request(path, status, time.perf_counter() - start)


AGAIN, CLOSE = {"Retry-After": "1"}, {"Connection": "close"}  # signals that the rest of the body is not read
REFUSED_WITH = {401: {"WWW-Authenticate": "Bearer"}, 413: CLOSE, 503: AGAIN, 504: AGAIN | CLOSE}
PATHS = ("/predict", "/about", "/health", "/metrics", "/", "/docs", "/openapi.json")
HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
