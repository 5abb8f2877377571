"""The page in headless Chromium: figures, interaction, phones, dark mode and printing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from multitudes.lab.report import write
from tests.lab.report.fake_run import FEW, METHODS, evil_run, table_data, write_run

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
    """Open pages, reusing open ones, and check that they have no errors and load nothing from elsewhere."""
    known: dict[tuple[str, bool, str, bool], tuple[Any, list[str]]] = {}

    def load(name: str, phone: bool, scheme: str, script: bool) -> tuple[Any, list[str]]:
        size = PHONE if phone else DESK
        look = {"viewport": size, "color_scheme": scheme, "has_touch": phone, "is_mobile": phone}
        page = browser.new_page(**look, java_script_enabled=script)
        wrong: list[str] = []
        page.on("console", lambda message: message.type in ("error", "warning") and wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        own = ("file:", "data:", "blob:")
        page.on("request", lambda request: request.url.startswith(own) or wrong.append(request.url))
        page.goto(pages[name].as_uri())
        return page, wrong

    @contextmanager
    def open_page(
        name: str, phone: bool = False, scheme: str = "light", script: bool = True, unfold: bool = False
    ) -> Iterator[Any]:
        key = (name, phone, scheme, script)
        if key not in known:
            known[key] = load(*key)
        page, wrong = known[key]
        page.evaluate(UNFOLD, unfold)
        yield page
        assert wrong == []

    yield open_page
    for page, _ in known.values():
        page.close()


UNFOLD = "(open) => document.querySelectorAll('details').forEach((each) => { each.open = open; })"

DRAWN = """
() => [...document.querySelectorAll('.plot')].map((plot) => {
  const chart = plot.querySelector('.view:not([hidden]) .chart');
  const own = chart.getBoundingClientRect();
  const seen = (each) => { const box = each.getBoundingClientRect(); return box.width + box.height > 0; };
  const marks = [...chart.querySelectorAll('g polyline:not(.none), g .marks')];
  const outside = [...chart.querySelectorAll('g, text')].filter((each) => {
    const box = each.getBoundingClientRect();
    return seen(each) && (box.left < own.left - 1 || box.right > own.right + 1 || box.bottom > own.bottom + 1);
  });
  return [plot.id, marks.length, marks.filter(seen).length, outside.length];
})
"""


@pytest.mark.parametrize(("name", "phone"), [("digits", False), ("table", True), ("evil", True)])
def test_every_figure_is_drawn_within_its_frame(opened: Open, name: str, phone: bool) -> None:
    with opened(name, phone, "dark" if phone else "light", unfold=True) as page:
        drawn = page.evaluate(DRAWN)
    assert len(drawn) == {"digits": 10, "table": 7, "evil": 10}[name]
    for plot, marks, seen, outside in drawn:
        assert seen == marks > 0, plot
        assert outside == 0, plot


def test_without_a_script_all_figures_are_visible_in_colour(opened: Open) -> None:
    with opened("digits", script=False) as page:
        views = page.locator("#plot-cost .view")
        assert views.count() > 1 and page.locator(".chooser").first.is_hidden()
        page.locator("#cost summary").click()
        assert all(views.nth(at).is_visible() for at in range(views.count()))
        last = page.locator('#plot-cost [data-method="8"]').first
        assert last.evaluate("(g) => getComputedStyle(g).color") != MUTE


@pytest.mark.parametrize("name", ["digits", "table", "evil"])
def test_a_phone_does_not_scroll_sideways(opened: Open, name: str) -> None:
    with opened(name, phone=True, scheme="dark") as page:
        for unfold in (False, True):
            page.evaluate(UNFOLD, unfold)
            wide, seen = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert wide <= seen == PHONE["width"]
            inside = "[...document.querySelectorAll('.chart, .legend, h1, p, dd, figure, select')]"
            assert page.evaluate(f"{inside}.every((each) => each.getBoundingClientRect().right <= {PHONE['width']})")


@pytest.mark.parametrize("name", ["digits", "table"])
def test_the_texts_of_figures_are_legible_on_a_phone(opened: Open, name: str) -> None:
    """No text is smaller than 9.5 pixels, and no ticks overlap."""
    script = """
      () => [...document.querySelectorAll('.view:not([hidden]) .chart')].map((chart) => {
        const unit = chart.getBoundingClientRect().width / chart.viewBox.baseVal.width;
        const texts = [...chart.querySelectorAll('text')];
        const sizes = texts.map((each) => unit * parseFloat(getComputedStyle(each).fontSize));
        const ticks = texts.filter((each) => each.matches('.tick, .title')).map((each) => each.getBoundingClientRect());
        const cross = (a, b) => a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
        const over = ticks.filter((a, at) => ticks.slice(at + 1).some((b) => cross(a, b)));
        return [chart.ariaLabel, Math.min(...sizes, 99), over.length];
      })
    """
    with opened(name, phone=True, scheme="dark", unfold=True) as page:
        for title, smallest, over in page.evaluate(script):
            assert smallest >= 9.5 and over == 0, title


def values(page: Any, column: int) -> list[float]:
    rows = page.locator(".board").first.locator("tbody tr")
    return [
        float(value) for value in rows.evaluate_all(f"(all) => all.map((row) => row.cells[{column}].dataset.value)")
    ]


def test_headings_sort_by_click_and_by_key(opened: Open) -> None:
    with opened("digits") as page:
        table = page.locator(".board").first
        assert values(page, 1) == sorted(values(page, 1))
        heading, before = table.locator("thead th").nth(2), values(page, 2)
        for order, turned in (("descending", True), ("ascending", False), ("descending", True)):
            heading.get_by_role("button").click()
            assert values(page, 2) == sorted(before, reverse=turned) and heading.get_attribute("aria-sort") == order
        table.get_by_role("button", name="NLL").press("Enter")
        assert values(page, 1) == sorted(values(page, 1))
        table.get_by_role("button", name="Method").press("Space")
        names = table.locator("tbody th").evaluate_all("(all) => all.map((each) => each.dataset.value)")
        assert names == sorted(names) and len(names) == 11
        states = table.locator("thead th").evaluate_all("(all) => all.map((each) => each.ariaSort)")
        assert states.count("ascending") == 1 and states[0] == "ascending"
        rest = page.locator(".board").nth(1)
        page.evaluate(UNFOLD, True)
        rest.get_by_role("button", name="overconfidence").click()
        at = rest.locator("thead th").evaluate_all("(all) => all.findIndex((each) => each.ariaSort === 'other')")
        cells = rest.locator(f"tbody tr td:nth-child({at + 1})")
        found = cells.evaluate_all("(all) => all.map((each) => each.dataset.value ?? null)")
        sizes = [abs(float(value)) for value in found[:9]]
        assert sizes == sorted(sizes)
        assert found[9:] == [None, None]


MUTE = "rgb(185, 192, 200)"


def coloured(page: Any, figure: str) -> list[int]:
    """Return the coloured methods of a figure."""
    script = """
      ([name, mute]) => [...document.querySelectorAll(`#${name} .view:not([hidden]) .m`)]
        .filter((each) => getComputedStyle(each).color !== mute).map((each) => Number(each.dataset.method))
    """
    return sorted(set(page.evaluate(script, [figure, MUTE])))


def test_at_most_six_methods_are_highlighted(opened: Open) -> None:
    with opened("digits") as page:
        buttons = page.locator(".legend button")
        assert page.locator(".legend").count() == 1 and buttons.count() == 9
        assert coloured(page, "plot-cost") == coloured(page, "plot-size") == [0, 1, 2, 3, 4, 5]
        buttons.nth(7).click()
        page.mouse.move(0, 0)
        assert coloured(page, "plot-cost") == coloured(page, "plot-size") == [1, 2, 3, 4, 5, 7]
        assert [buttons.nth(at).get_attribute("aria-pressed") for at in (0, 1, 7)] == ["false", "true", "true"]
        buttons.nth(7).click()
        page.mouse.move(0, 0)
        assert coloured(page, "plot-cost") == [1, 2, 3, 4, 5]
        buttons.nth(0).press("Enter")
        assert coloured(page, "plot-cost") == [0, 1, 2, 3, 4, 5]
        panels = page.locator("#calibration .panel")
        page.locator("#calibration summary").first.click()
        assert [panels.nth(at).is_visible() for at in range(9)] == [True] * 6 + [False] * 3


def test_hovering_colours_a_method_and_shows_its_numbers(opened: Open) -> None:
    with opened("digits", unfold=True) as page:
        tip = page.locator("#tip")
        assert tip.is_hidden() and 8 not in coloured(page, "plot-cost")
        marks = page.locator('#plot-cost .view:not([hidden]) [data-method="8"] .marks')
        marks.scroll_into_view_if_needed()
        box = marks.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        name = page.locator(".legend button").nth(8).inner_text()
        assert tip.is_visible() and tip.inner_text().startswith(name) and "NLL 0." in tip.inner_text()
        assert 8 in coloured(page, "plot-cost") and 8 in coloured(page, "plot-size")
        page.mouse.move(0, 0)
        assert tip.is_hidden() and 8 not in coloured(page, "plot-size")


def test_a_selection_changes_the_figure(opened: Open) -> None:
    title = "#{} .view:not([hidden]) .title"
    with opened("digits", unfold=True) as page:
        assert page.locator(title.format("plot-cost")).first.inner_html().startswith("inference time")
        page.locator("select[data-plots=plot-cost]").select_option(label="accuracy against training time")
        assert page.locator(title.format("plot-cost")).first.inner_html().startswith("training time")
        together = page.locator("select[data-plots*=plot-shift-nll]")
        assert together.get_attribute("data-plots").split() == [f"plot-shift-{m}" for m in ("accuracy", "nll", "ece")]
        assert together.locator("option").all_inner_texts() == ["mean of all corruptions", "fog", "gaussian noise"]


def test_sections_unfold_individually_and_together(opened: Open) -> None:
    with opened("digits") as page:
        folds = page.locator(".fold")
        assert page.locator("details[open]").count() == 0
        page.locator("#size summary").click()
        assert page.locator("#plot-size .chart").first.is_visible() and page.locator(".fold[open]").count() == 1
        page.locator(".unfold").click()
        assert page.locator(".fold[open]").count() == folds.count() == 11
        page.locator(".unfold").click()
        assert page.locator(".fold[open]").count() == 0


def brightness(page: Any, script: str) -> float:
    red, green, blue = page.evaluate(f"({script}).match(/[0-9.]+/g).slice(0, 3).map(Number)")
    return float(0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


GROUND = "getComputedStyle(document.body).backgroundColor"
LABEL = "getComputedStyle(document.querySelector('#plot-cost .title')).fill"


def test_dark_mode_is_dark_and_the_printed_page_light_and_unfolded(opened: Open, tmp_path: Path) -> None:
    with opened("digits", scheme="dark") as page:
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print", color_scheme="dark")
        assert brightness(page, GROUND) > 0.9 and brightness(page, LABEL) < 0.3
        assert page.locator("details:not([open])").count() == 0
        page.set_viewport_size({"width": 688, "height": 900})  # A4 without margins
        wide = "[...document.querySelectorAll('.chart, table')].map((each) => each.getBoundingClientRect().right)"
        assert max(page.evaluate(wide)) <= 688
        page.set_viewport_size(DESK)
        page.emulate_media(media="screen", color_scheme="dark")
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert brightness(page, GROUND) < 0.15 and page.locator("details[open]").count() == 0
        page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").stat().st_size > 50_000
