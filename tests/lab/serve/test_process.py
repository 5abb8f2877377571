"""`multitudes serve` as a process: many clients, shutdown by SIGTERM, and its pages in headless Chromium."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from multitudes.lab import data as datasets
from multitudes.lab.data import Data
from multitudes.lab.study.run.store import Run
from tests.lab.cli.test_predict import garden, trained
from tests.lab.serve.serve_cases import (
    WAIT,
    Client,
    as_process,
    check_classes,
    eventually,
    expected,
    in_thread,
    once,
    png,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Run:
    methods = {"packed": {"members": 2}}
    return once(tmp_path_factory, "packed", data="digits", limit=300, methods=methods, epochs=2)


@pytest.fixture(scope="module")
def digits(images: Run) -> Data:
    return datasets.read(images.data_path)


@pytest.fixture(scope="module")
def running(images: Run) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """Start the program; the last test stops it."""
    with as_process(images.jobs[0].directory) as found:
        yield found


def test_concurrent_requests_get_the_answers_of_predict(
    images: Run, digits: Data, running: tuple[subprocess.Popen[str], Client]
) -> None:
    x = digits.test.x[torch.arange(320) % len(digits.test)]
    bodies = [png(image) for image in x]
    want = expected(images, "packed", x)

    def client(port: int, numbers: range) -> dict[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
        found = {}
        for number in numbers:
            connection.request("POST", "/predict", bodies[number], {"Content-Type": "image/png"})
            answer = connection.getresponse()
            found[number] = (answer.status, json.loads(answer.read()))
        connection.close()
        return found

    _, server = running
    with ThreadPoolExecutor(32) as pool:
        asked = [pool.submit(client, server.port, range(first, 320, 32)) for first in range(32)]
        found = {number: answer for each in asked for number, answer in each.result(WAIT).items()}
    assert len(found) == 320 and {status for status, _ in found.values()} == {200}
    for number, (_, answer) in found.items():
        check_classes(answer["answers"][0], want, number, digits.classes)
    batches = server.get("/metrics").body.decode().partition("multitudes_batch_rows_count ")[2]
    assert int(batches.split()[0]) < 300, "requests share batches"


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return True
    return False


def test_sigterm_finishes_running_requests_and_exits_with_0(
    images: Run, digits: Data, running: tuple[subprocess.Popen[str], Client]
) -> None:
    body = png(digits.test.x[0])
    head = (
        f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    process, server = running
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as connection:
        connection.sendall(head.encode() + body[:10])
        eventually(lambda: "multitudes_under_way 1\n" in server.get("/metrics").body.decode())
        process.send_signal(signal.SIGTERM)
        eventually(lambda: refused(server.port))
        assert process.poll() is None
        connection.sendall(body[10:])
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        (found,) = json.loads(answer.read())["answers"]
    assert process.wait(WAIT) == 0
    check_classes(found, expected(images, "packed", digits.test.x[:1]), 0, digits.classes)


# -- the page ----------------------------------------------------------------------------------------------

DESK, PHONE = {"width": 1200, "height": 900}, {"width": 400, "height": 850}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Open pages of a server, and check that they have no errors and load nothing from elsewhere."""
    pages = []
    wrong: list[str] = []

    def load(client: Client, size: dict[str, int] = DESK, scheme: str = "light", path: str = "/") -> Any:
        page = browser.new_page(viewport=size, color_scheme=scheme)
        pages.append(page)
        home = f"http://127.0.0.1:{client.port}/"
        page.on("console", lambda message: message.type in ("error", "warning") and wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        own = (home, "data:", f"blob:{home}")
        page.on("request", lambda request: request.url.startswith(own) or wrong.append(request.url))
        page.goto(f"{home}{path.removeprefix('/')}")
        page.wait_for_selector("#login:not([hidden]), #desk:not([hidden])") if path == "/" else None
        return page

    load.wrong = wrong  # type: ignore[attr-defined]
    yield load
    for page in pages:
        page.close()
    assert wrong == []


def test_the_page_predicts_images_and_examples(opened: Any, images: Run, digits: Data, tmp_path: Path) -> None:
    file = tmp_path / "digit.png"
    file.write_bytes(png(digits.test.x[3]))
    want = expected(images, "packed", digits.test.x[3:4])
    with in_thread(images.jobs[0].directory) as client:
        for size, scheme in ((DESK, "light"), (PHONE, "dark")):
            page = opened(client, size, scheme)
            page.set_input_files("#file", file)
            verdict = page.wait_for_selector("#result .verdict").inner_text()
            assert verdict.split()[0] == digits.classes[int(want.label)]
            assert page.locator(".votes li").count() == 2
            assert page.locator(".meter .track").count() == 10
            assert "members" in page.inner_text(".fact") and "Set at 95 %" in page.inner_text("#result")
            page.click("#unsure button")
            page.wait_for_selector("#unsure button[aria-pressed=true]")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.close()


EVIL = "<img src=x onerror=alert(1)>"


def test_the_page_predicts_rows_and_escapes_names(opened: Any, tmp_path: Path) -> None:
    text = garden(tmp_path / "garden.csv").read_text().replace("sun,kind", f"sun,{EVIL}").replace("oak", EVIL)
    (tmp_path / "garden.csv").write_text(text)
    options = {"target": "height", "methods": {"deep": {"members": 2}}, "epochs": 3, "model": "mlp"}
    run = trained(tmp_path / "run", data=tmp_path / "garden.csv", **options)
    with in_thread(run.jobs[0].directory) as client:
        (want,) = client.answers({"rows": [{"sun": 4, EVIL: EVIL}]})
        page = opened(client)
        assert page.locator("#fields label").all_inner_texts() == ["sun", EVIL]
        page.fill("#field-0", "4")
        page.fill("#field-1", EVIL)
        page.click("#send")
        first = page.wait_for_selector("#result .verdict").inner_text()
        assert float(first.split()[0]) == pytest.approx(want["mean"], rel=1e-4)
        assert page.locator(".range .member").count() == 2
        page.fill("#paste", "0.5;fern")
        page.keyboard.press("Enter")
        page.wait_for_function("(was) => document.querySelector('.verdict').innerText !== was", arg=first)
        assert page.input_value("#field-1") == "fern"
        page.fill("#paste", "1,2,3")
        page.keyboard.press("Tab")
        assert "must have 2 values" in page.wait_for_selector("#problem:not([hidden])").inner_text()
        page.click("#sure button")
        page.wait_for_selector("#sure button[aria-pressed=true]")
        assert page.locator("main img:visible").count() == 0


@pytest.mark.slow
def test_the_page_asks_for_a_token_and_the_api_page_loads(opened: Any, images: Run) -> None:
    with in_thread(images.jobs[0].directory, token="sesame") as client:
        page = opened(client)
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        assert "Bearer TOKEN" in page.wait_for_selector("#problem:not([hidden])").inner_text()
        page.fill("#token", "sesame")
        page.keyboard.press("Enter")
        page.click("#sure button")
        page.wait_for_selector("#result .verdict")
        page = opened(client, PHONE, path="/docs")
        assert "POST /predict" in page.inner_text("main")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        opened.wrong[:] = [each for each in opened.wrong if "401" not in each]  # logged by Chromium
