"""The page in a real browser: headless Chromium draws every plot, at two widths, in light and dark, and on paper."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from multitudes.report import write
from tests.fake_run import FEW, METHODS, evil_run, table_data, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("pages")
    many = {name: METHODS[name] for name in (*FEW, "masksembles", "mimo", "variance", "smooth", "swag")}
    return {
        "digits": write(write_run(place / "digits", many, [0, 1], missing=["mimo-1"], failed={"swag-0": "no memory"})),
        "table": write(write_run(place / "table", data=table_data())),
        "evil": write(evil_run(place / "evil", {"a_method_with_a_very_long_name_" * 3: METHODS["single"]})),
    }


@pytest.fixture(scope="module")
def opened(browser: Any, pages: dict[str, Path]) -> Iterator[Open]:
    """Opens a page, or one that is open, and says that nothing went wrong on it or was loaded from elsewhere."""
    known: dict[tuple[str, bool, str], tuple[Any, list[str]]] = {}

    def load(name: str, phone: bool, scheme: str) -> tuple[Any, list[str]]:
        size = PHONE if phone else DESK
        page = browser.new_page(viewport=size, color_scheme=scheme, has_touch=phone, is_mobile=phone)
        wrong: list[str] = []
        page.on("console", lambda message: message.type in ("error", "warning") and wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        own = ("file:", "data:", "blob:")
        page.on("request", lambda request: request.url.startswith(own) or wrong.append(request.url))
        page.goto(pages[name].as_uri())
        page.wait_for_function(
            "[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('.main-svg'))"
        )
        return page, wrong

    @contextmanager
    def open_page(name: str, phone: bool = False, scheme: str = "light") -> Iterator[Any]:
        if (name, phone, scheme) not in known:
            known[name, phone, scheme] = load(name, phone, scheme)
        page, wrong = known[name, phone, scheme]
        yield page
        assert wrong == []

    yield open_page
    for page, _ in known.values():
        page.close()


DRAWN = """
() => [...document.querySelectorAll('.plot')].map((plot) => {
  const marks = [...plot.querySelectorAll('.scatterlayer path, .contourlayer path, .heatmaplayer image')];
  const seen = marks.filter((mark) => { const box = mark.getBoundingClientRect(); return box.width + box.height > 0; });
  const made = plot.querySelectorAll('.scatterlayer .trace, .contourlayer .contour');
  return [plot.id, plot.data.length, made.length, seen.length];
})
"""


@pytest.mark.parametrize("name", ["digits", "table", "evil"])
@pytest.mark.parametrize(("phone", "scheme"), [(False, "light"), (True, "dark")], ids=["desk", "phone"])
def test_every_plot_is_drawn_without_an_error(opened: Open, name: str, phone: bool, scheme: str) -> None:
    with opened(name, phone, scheme) as page:
        drawn = page.evaluate(DRAWN)
    assert len(drawn) == {"digits": 9, "table": 5, "evil": 9}[name]
    for plot, asked, made, seen in drawn:
        assert made == asked > 0, plot
        assert seen >= asked, plot


@pytest.mark.parametrize("name", ["digits", "table", "evil"])
def test_a_phone_does_not_scroll_sideways(opened: Open, name: str) -> None:
    with opened(name, phone=True, scheme="dark") as page:
        for unfold in (False, True):
            page.evaluate(
                "(open) => document.querySelectorAll('details').forEach((each) => { each.open = open; })", unfold
            )
            wide, seen = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert wide <= seen == PHONE["width"]
            # What is wider than its box could be seen by nobody, unless the box scrolls.
            inside = "[...document.querySelectorAll('.plot .main-svg, .legend, h1, p, dd, figure, select')]"
            assert page.evaluate(f"{inside}.every((each) => each.getBoundingClientRect().right <= {PHONE['width']})")


def values(page: Any, column: int) -> list[float]:
    rows = page.locator(".board").first.locator("tbody tr")
    return [
        float(value) for value in rows.evaluate_all(f"(all) => all.map((row) => row.cells[{column}].dataset.value)")
    ]


def test_a_heading_sorts_its_column_by_click_and_by_key_and_once_more_turns_the_order(opened: Open) -> None:
    with opened("digits") as page:
        table = page.locator(".board").first
        heading, before = table.locator("thead th").nth(1), values(page, 1)
        for order, turned in (("ascending", False), ("descending", True)):
            heading.get_by_role("button").click()
            assert values(page, 1) == sorted(before, reverse=turned) and heading.get_attribute("aria-sort") == order
        table.get_by_role("button", name="NLL").press("Enter")
        assert values(page, 2) == sorted(values(page, 2))
        table.get_by_role("button", name="Method").press("Space")
        names = table.locator("tbody th").evaluate_all("(all) => all.map((each) => each.dataset.value)")
        assert names == sorted(names) and len(names) == 9
        states = table.locator("thead th").evaluate_all("(all) => all.map((each) => each.ariaSort)")
        assert states.count("ascending") == 1 and states[0] == "ascending"


def test_a_legend_hides_a_method_in_all_plots(opened: Open) -> None:
    count = "plot.data.filter((trace) => trace.visible === false).length"
    hidden = f"[...document.querySelectorAll('.plot')].map((plot) => {count})"
    with opened("digits") as page:
        assert set(page.evaluate(hidden)) == {0}
        button = page.locator(".legend button", has_text="deep").first
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        # Two marks of one method on the plot of costs, a line or points on the others, and none on the plane.
        assert page.evaluate(hidden) == [2, 1, 1, 1, 1, 1, 1, 1, 0]
        button.click()
        assert set(page.evaluate(hidden)) == {0}


def test_another_cost_or_corruption_can_be_chosen(opened: Open) -> None:
    titles = "(name) => document.getElementById(name).layout.xaxis.title.text"
    with opened("digits") as page:
        assert page.evaluate(titles, "plot-cost").startswith("inference time")
        page.locator("select[data-plots=plot-cost]").select_option(label="accuracy against training time")
        assert page.evaluate(titles, "plot-cost").startswith("training time")
        together = page.locator("select[data-plots*=plot-shift-nll]")
        assert together.get_attribute("data-plots").split() == [f"plot-shift-{m}" for m in ("accuracy", "nll", "ece")]
        assert together.locator("option").all_inner_texts() == ["mean of all corruptions", "fog", "gaussian noise"]


def brightness(page: Any, script: str) -> float:
    red, green, blue = page.evaluate(f"({script}).match(/[0-9.]+/g).slice(0, 3).map(Number)")
    return float(0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


GROUND = "getComputedStyle(document.body).backgroundColor"
LABEL = "getComputedStyle(document.querySelector('#plot-cost .xtick text')).fill"


def test_dark_mode_is_dark_in_plots_too_and_follows_the_system(opened: Open) -> None:
    with opened("digits", scheme="dark") as page:
        assert brightness(page, GROUND) < 0.15 and brightness(page, LABEL) > 0.7
        page.emulate_media(color_scheme="light")
        page.wait_for_timeout(300)
        assert brightness(page, GROUND) > 0.9 and brightness(page, LABEL) < 0.3
        page.emulate_media(color_scheme="dark")


def test_paper_is_light_and_nothing_on_it_is_folded_or_too_wide(opened: Open, tmp_path: Path) -> None:
    with opened("digits", scheme="dark") as page:
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print", color_scheme="dark")
        assert brightness(page, GROUND) > 0.9 and brightness(page, LABEL) < 0.3
        assert page.locator("details:not([open])").count() == 0
        wide = "[...document.querySelectorAll('.plot .main-svg')].map((each) => each.getBoundingClientRect().width)"
        assert max(page.evaluate(wide)) <= 670  # an A4 page without its margins is 688 pixels wide
        page.emulate_media(media="screen", color_scheme="dark")
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert brightness(page, GROUND) < 0.15 and page.locator("details[open]").count() == 0
        assert max(page.evaluate(wide)) > 1000
        page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").stat().st_size > 50_000
