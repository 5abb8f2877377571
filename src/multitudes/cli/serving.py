"""`serve`: a trained network behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from multitudes.cli.answers import JOB, ModelFile
from multitudes.cli.options import Common

__all__ = ["serve"]


def serve(
    job: Annotated[Path, Argument(help=JOB)],
    host: Annotated[str, Option(help="Where to listen; 0.0.0.0 is every address of this machine.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 is any free one.")] = 8000,
    token: Annotated[
        str | None,
        Option(
            envvar="MULTITUDES_TOKEN", metavar="TOKEN", help="What requests must bring: Authorization: Bearer TOKEN."
        ),
    ] = None,
    level: Annotated[float, Option(help="Of sets and intervals, where a request asks for none.")] = 0.95,
    draws: Annotated[int | None, Option(min=1, help="Predictions of a method that draws.")] = None,
    wait: Annotated[float, Option(min=0, help="Milliseconds that a batch waits for requests on their way.")] = 3.0,
    max_size: Annotated[float, Option(help="Megabytes of a request.")] = 10.0,
    max_rows: Annotated[int, Option(min=1, help="Rows, images or texts of a request.")] = 256,
    max_seconds: Annotated[float, Option(help="Seconds that a request may take.")] = 30.0,
    max_requests: Annotated[int, Option(min=1, help="Requests under way at once.")] = 128,
    model_file: ModelFile = None,
    *,
    common: Common,
) -> None:
    """Serve a trained network: POST /predict for programs, / for people, /docs for both.

    An answer has the label, probabilities, entropy, mutual information, the conformal set or interval, and what each
    member predicts. Requests that come together are answered as one batch.
    """
    from multitudes.core.checks import check_number, needed

    for module in ("fastapi", "uvicorn"):
        needed(module, "serve", "multitudes serve")
    from multitudes.cli.screen import say
    from multitudes.serve.app import create_app
    from multitudes.serve.limits import Limits
    from multitudes.serve.network import ServedNetwork
    from multitudes.serve.server import is_loopback, listen, run
    from multitudes.study.trained import Trained

    check_number("level", level, 0, above=True, below=1)
    check_number("wait", wait, 0, high=1000)
    check_number("max_size", max_size, 0, above=True)
    check_number("max_seconds", max_seconds, 0, above=True)
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token and token):
        raise ValueError("--token must be printable ASCII characters without spaces around them")
    limits = Limits(size=max(1, int(1e6 * max_size)), rows=max_rows, seconds=max_seconds, requests=max_requests)
    trained = Trained.read(job, common.device, draws, model_file)
    network = ServedNetwork(trained, draws=draws, seed=common.seed or 0, precision=common.precision)
    with listen(host, port) as listening:
        at, number = listening.getsockname()[:2]
        local = is_loopback(listening)
        app = create_app(network, level=level, limits=limits, token=token, local=local, wait=wait / 1000)
        if token is None and not local:
            say(f"Warning: whoever reaches {at}:{number} can use the network, since there is no --token")
        say(f"Serving {trained.job.name} at http://{f'[{at}]' if ':' in at else at}:{number} until Ctrl+C")
        run(app, listening, max_seconds)
    say("Stopped: every request that was under way has been answered")
