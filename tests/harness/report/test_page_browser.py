"""The report in a real browser, on synthetic and on committed results: `tox -e browser`, which has Playwright.

Every test opens its pages in windows of their own, and ends by asking whether one of them wrote an error or a warning
to its console or asked for anything but its own file.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from places import RESULTS
from report_rows import CAUSAL, SQUARE, in_environment, sweep_rows
from small_training import run_of

from attnbench.harness.report.page.render import page as rendered
from attnbench.harness.report.page.results import Results, read_results
from attnbench.kernels.registry import registry

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright, as `tox -e browser` has it")
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
if CHROMIUM is None:
    pytest.skip(f"needs one of {', '.join(NAMES)} (Debian: apt-get install chromium)", allow_module_level=True)

H200 = RESULTS / "nvidia-h200"
WIDTHS = {"phone": 390, "desktop": 1440}
# Playwright adds --headless and --no-sandbox, which Chromium needs to run as root.
FLAGS = (
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
CASES = "[...document.querySelectorAll('details.case')]"
SHOWN = f"{CASES}.filter(each => each.checkVisibility()).map(each => each.id)"
ROWS = "[...document.querySelectorAll('tr[data-plan]:not(.off)')].map(each => each.dataset.plan)"
BACKGROUND = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)"
OPEN_ALL = "document.querySelectorAll('details').forEach(each => each.open = true)"


class Window(NamedTuple):
    """A page, what its console says, and the addresses that it asked for."""

    page: Any
    complaints: list[str]
    requests: list[str]


def open_window(browser: Any, address: str, width: int = WIDTHS["desktop"], scheme: str = "light") -> Window:
    """The page at an address, loaded, in a context that shares nothing with any other."""
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    window = Window(context.new_page(), [], [])
    window.page.on(
        "console", lambda message: message.type in ("error", "warning") and window.complaints.append(message.text)
    )
    window.page.on("pageerror", lambda error: window.complaints.append(str(error)))
    window.page.on("request", lambda request: window.requests.append(request.url))
    window.page.goto(address)
    return window


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file and returns the page; no page may complain or ask for another address until the test is over."""
    windows: list[tuple[Window, str]] = []

    def visit(path: Path, *, at: str = "", **look: Any) -> Any:
        windows.append((open_window(browser, path.as_uri() + at, **look), path.as_uri()))
        return windows[-1][0].page

    yield visit
    for window, address in windows:
        assert window.complaints == []
        assert set(window.requests) == {address}
        window.page.context.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two machines, both directions, training runs."""
    there = [in_environment(each, device_name="Another GPU") for each in sweep_rows()[:3]]
    runs = [run_of([3, 2, 1, 1], role, seed) for role in ("candidate", "baseline") for seed in range(3)]
    return written(tmp_path_factory.mktemp("page"), Results({"here": sweep_rows(), "there": there}, runs))


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that was measured on the H200, drawn by the code that is tested."""
    return written(tmp_path_factory.mktemp("h200"), read_results([H200]))


def written(folder: Path, results: Results) -> Path:
    path = folder / "report.html"
    path.write_text(rendered(results, registry()), encoding="utf-8")
    return path


def choose(page: Any, **filters: str) -> None:
    for name, value in filters.items():
        field = page.locator(f"#filters [name={name}]")
        field.fill(value) if name == "plan" else field.select_option(value)


def won(page: Any, spec: object) -> list[str]:
    """What the map of winners shows for a spec, as a reader sees it."""
    return page.evaluate(
        """spec => [...document.querySelectorAll('.map a')].filter(each => document.querySelector(
        each.getAttribute('href')).textContent.includes(spec)).map(each => each.innerText.trim())""",
        str(spec),
    )


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
def test_the_committed_results_fit_the_window(visit, committed, width):
    page = visit(committed, width=width)
    assert page.locator("h1").inner_text() == "Attention on NVIDIA H200"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate(OPEN_ALL)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    "filters",
    [
        {"direction": "training"},
        {"mask": "causal"},
        {"dim": "64"},
        {"plan": "FA3:fp8"},
        {"direction": "forward", "mask": "none", "dim": "128", "plan": "triton"},
        {"plan": "no such plan"},
    ],
    ids=str,
)
def test_a_filter_keeps_exactly_what_matches(visit, committed, filters):
    page = visit(committed)
    plans = "[...each.querySelectorAll('tr[data-plan]')].map(row => row.dataset.plan)"
    cases = page.evaluate(f"{CASES}.map(each => ({{id: each.id, ...each.dataset, plan: {plans}}}))")
    text = filters.get("plan", "").lower()

    def matches(case: dict[str, Any]) -> bool:
        facts = all(case[name] == value for name, value in filters.items() if name != "plan")
        return facts and (not text or any(text in plan.lower() for plan in case["plan"]))

    wanted = [case["id"] for case in cases if matches(case)]
    assert len(wanted) < len(cases)
    choose(page, **filters)
    assert page.evaluate(SHOWN) == wanted
    assert page.locator("#count").inner_text() == f"{len(wanted)} of {len(cases)} shapes"
    cells = page.locator(".map a:visible").evaluate_all("all => all.map(each => each.hash.slice(1))")
    assert sorted(cells) == sorted(wanted)
    assert all(text in plan.lower() for plan in page.evaluate(ROWS))
    page.get_by_role("button", name="Reset").click()
    playwright.expect(page.locator("#count")).to_have_text(f"{len(cases)} of {len(cases)} shapes")
    assert page.evaluate(SHOWN) == [case["id"] for case in cases]


NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?")


def column(table: Any, place: int) -> list[str]:
    return table.locator(f"tbody tr > :nth-child({place + 1})").all_inner_texts()


def figure(text: str) -> float:
    """What a cell says, in its column's unit: the first number, sizes in MiB."""
    return float(NUMBER.search(text)[0]) * (1024 if "GiB" in text else 1)


def hold_order(table: Any) -> int:
    """Sort the table by each of its headings, both ways; the number of headings that do."""
    headings = table.locator("thead th")
    before = sorted(table.locator("tbody tr").all_inner_texts())
    held = 0
    for place, classes in enumerate(headings.evaluate_all("all => all.map(each => each.className)")):
        button = headings.nth(place).locator("button")
        if not button.count():
            continue
        for order in ("ascending", "descending"):
            button.click()
            assert headings.nth(place).get_attribute("aria-sort") == order
            assert table.locator("[aria-sort]").count() == 1
            texts = column(table, place)
            filled = [text for text in texts if text.strip()]
            assert texts[: len(filled)] == filled, "what has no value comes last"
            if classes == "n":
                figures = [figure(text) for text in filled]
                assert figures == sorted(figures, reverse=order == "descending")
            else:
                names = table.evaluate("(_, texts) => texts.sort(new Intl.Collator().compare)", filled)
                assert filled == (names if order == "ascending" else names[::-1])
        held += 1
    assert sorted(table.locator("tbody tr").all_inner_texts()) == before
    return held


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
def test_a_heading_sorts_the_candidates_of_a_case(visit, committed, width):
    page = visit(committed, width=width)
    case = page.locator("details.case[data-direction=training]:has(tbody tr:nth-child(9))").first
    case.locator("summary").click()
    assert hold_order(case.locator("table")) >= 9


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
def test_a_cell_leads_to_its_case(visit, committed, width):
    page = visit(committed, width=width)
    cells = page.locator(".map a")
    for place in (0, cells.count() // 2, cells.count() - 1):
        number = cells.nth(place).get_attribute("data-case")
        case = page.locator(f"#case-{number}")
        for _ in range(2):  # the second time the address has the case's name already
            cells.nth(place).click()
            playwright.expect(case).to_have_attribute("open", "")
            assert on_top(case.locator("summary")), number
            assert case.get_by_role("heading", name="Measure it again").is_visible()
            assert page.evaluate("document.activeElement.parentElement.id") == f"case-{number}"
            case.locator("summary").click()


def on_top(element: Any) -> bool:
    """Whether a reader sees it: inside the window, and nothing lies over it."""
    return element.evaluate(
        """each => {
        const {left, top, bottom} = each.getBoundingClientRect();
        const inside = top >= 0 && bottom <= innerHeight;
        return inside && [top + 2, bottom - 2].every(y => each.contains(document.elementFromPoint(left + 4, y)));
    }"""
    )


@pytest.mark.parametrize("width", [320, *WIDTHS.values()])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_it_is_switched_and_is_kept(visit, file, width, scheme):
    page = visit(file, width=width, scheme=scheme)
    page.evaluate(OPEN_ALL)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert (max(page.evaluate(BACKGROUND)) < 60) == (scheme == "dark")
    page.locator("#theme").click()
    assert (max(page.evaluate(BACKGROUND)) < 60) == (scheme == "light")
    page.reload()
    assert (max(page.evaluate(BACKGROUND)) < 60) == (scheme == "light")
    page.locator("#theme").click()
    assert (max(page.evaluate(BACKGROUND)) < 60) == (scheme == "dark")


def test_a_filter_applies_to_maps_and_dots_and_machines(visit, file):
    page = visit(file)
    assert page.locator("h1").inner_text() == "Attention on A GPU and Another GPU"
    choose(page, direction="training")
    assert page.locator(".map caption:visible").all_inner_texts() == ["Training, forward and backward"]
    dots = "[...document.querySelectorAll('figure.scatter [data-case]')].filter(each => each.checkVisibility()).length"
    assert page.evaluate(dots) == 3
    choose(page, direction="", machine="1")
    assert len(page.evaluate(SHOWN)) == 1
    choose(page, machine="", plan="TE:FP8")
    assert set(page.evaluate(ROWS)) == {"te:fp8>te:fp8"}


def test_the_budget_chooses_again(visit, file):
    page = visit(file)
    assert won(page, SQUARE)[0].startswith("fa3:fp8")
    lines = "[...document.querySelectorAll('.budget')].filter(each => getComputedStyle(each).display !== 'none').length"
    assert page.evaluate(lines) == 3
    choose(page, budget="2")  # an error of 0.05
    assert won(page, SQUARE)[0] == "fa3:bf16"
    assert won(page, CAUSAL)[0] == "fa3:bf16"
    assert page.evaluate(lines) == 3


def test_a_cell_leads_to_its_case_by_keyboard_alone(visit, file):
    page = visit(file)
    page.locator(".map a").first.press("Enter")
    playwright.expect(page.locator("details.case[open]")).to_have_count(1)
    assert page.evaluate("document.activeElement.matches('details.case[open] > summary')")


def test_every_control_and_scrolling_table_is_reached_by_the_tab_key_and_has_a_name(visit, file):
    page = visit(file)
    unnamed = page.evaluate("""['a', 'button', 'select', 'input', 'summary', '[tabindex="0"]', 'svg[role=img]']
        .flatMap(each => [...document.querySelectorAll(each)])
        .filter(each => !(each.textContent?.trim() || each.getAttribute('aria-label') || each.labels?.length))
        .map(each => each.outerHTML.slice(0, 80))""")
    assert unnamed == []
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every(each => each.tabIndex === 0)")
    headless = "[...document.querySelectorAll('table')].filter(each => !each.querySelector('th[scope]')).length"
    assert page.evaluate(headless) == 0
    nameless = "[...document.querySelectorAll('table')].filter(each => !each.caption && !each.closest('[aria-label]'))"
    assert page.evaluate(f"{nameless}.length") == 0


def test_a_row_s_plan_goes_into_the_command_of_its_case(visit, file):
    page = visit(file)
    page.evaluate(OPEN_ALL)
    found = page.evaluate("""[...document.querySelectorAll('details.case tr[data-plan]')].map(row => {
        row.querySelector('th button').click();
        const command = row.closest('details').querySelector('code[data-plan]').textContent;
        return command.endsWith(`--backends '${row.dataset.plan}'`);
    })""")
    assert found == [True] * 11


def test_were_an_element_injected_the_policy_would_still_stop_it(browser, file, tmp_path):
    path = tmp_path / "injected.html"
    evil = "<script>window.pwned=1</script><img src='http://localhost:9/x.png' onerror='window.pwned=1'>"
    path.write_text(file.read_text(encoding="utf-8").replace("<main", f"{evil}<main", 1), encoding="utf-8")
    window = open_window(browser, path.as_uri())
    window.page.wait_for_timeout(200)
    assert window.page.evaluate("window.pwned === undefined")
    assert window.complaints
    assert all("Content Security Policy" in each for each in window.complaints)
    assert len(window.page.evaluate(SHOWN)) == 4
