"""The page in a real browser: silent, offline, filtered, on a phone, in the dark, by keyboard, on paper."""

from pathlib import Path

import pytest
from chromium import FOUND, MISSING, Chromium
from reported import CAUSAL, SQUARE, a_sweep, elsewhere, row, told
from small_training import run_of

from attnbench.harness.page.render import page
from attnbench.harness.page.results import Results, read_results
from attnbench.registry import registry

pytestmark = pytest.mark.skipif(FOUND is None, reason=MISSING)
H200 = Path(__file__).parents[2] / "results" / "nvidia-h200"
SHOWN = "[...document.querySelectorAll('details.case')].filter(each => each.checkVisibility()).map(each => each.id)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Two machines, both directions, training runs."""
    there = [elsewhere(each, device_name="Another GPU") for each in a_sweep()[:3]]
    runs = [run_of([3, 2, 1, 1], role, seed) for role in ("candidate", "baseline") for seed in range(3)]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(Results({"here": a_sweep(), "there": there}, runs), registry()), encoding="utf-8")
    return path


@pytest.fixture
def shown(browser, file):
    browser.look(1280, 800)
    return opened(browser, file)


def opened(browser, path):
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(path.as_uri())
    return browser


def choose(browser, name, value):
    browser.run(f"""(() => {{
        const field = document.forms[0].elements[{name!r}];
        field.value = {value!r};
        field.dispatchEvent(new Event("input", {{bubbles: true}}));
        if (field.value !== {value!r}) throw new Error("no such option");
    }})()""")


def won(browser, spec):
    """What the map of winners shows for a spec, as a reader sees it."""
    return browser.run(f"""[...document.querySelectorAll('.map a')].filter(each => document.querySelector(
        each.getAttribute('href')).textContent.includes({str(spec)!r})).map(each => each.innerText.trim())""")


def test_it_opens_without_a_complaint_and_asks_for_nothing_but_itself(shown, file):
    assert shown.complaints == []
    assert shown.requests == [file.as_uri()]
    assert shown.run("document.querySelector('h1').innerText") == "Attention on A GPU and Another GPU"


def test_the_committed_sweeps_open_as_quietly(browser, tmp_path):
    path = tmp_path / "h200.html"
    path.write_text(page(read_results([H200 / "quick"]), registry()), encoding="utf-8")
    opened(browser, path)
    assert (browser.complaints, browser.requests) == ([], [path.as_uri()])
    assert len(browser.run(SHOWN)) == 12


def test_the_driver_hears_complaints_and_sees_requests(browser, tmp_path):
    """Or the silence above would mean nothing."""
    path = tmp_path / "loud.html"
    path.write_text("<img src='http://localhost:9/x.png'><script>console.error('loud'); nothing.here</script>")
    opened(browser, path)
    browser.run("new Promise(done => setTimeout(done, 200))")
    assert any("localhost:9" in each for each in browser.requests)
    assert any("loud" in each for each in browser.complaints)
    assert any("nothing is not defined" in each for each in browser.complaints)


def test_filters_choose_the_cases_everywhere_and_say_how_many(shown):
    everything = shown.run(SHOWN)
    assert len(everything) == 4
    choose(shown, "direction", "training")
    assert len(shown.run(SHOWN)) == 1
    assert shown.run("document.getElementById('count').innerText") == "1 of 4 shapes"
    maps = "[...document.querySelectorAll('.map caption')].filter(each => each.checkVisibility())"
    assert shown.run(f"{maps}.map(each => each.innerText)") == ["Training, forward and backward"]
    dots = "[...document.querySelectorAll('figure.scatter [data-case]')].filter(each => each.checkVisibility()).length"
    assert shown.run(dots) == 3
    choose(shown, "direction", "")
    choose(shown, "mask", "causal")
    assert len(shown.run(SHOWN)) == 1
    choose(shown, "mask", "")
    choose(shown, "dim", "64")
    assert len(shown.run(SHOWN)) == 1
    choose(shown, "dim", "")
    choose(shown, "machine", "1")
    assert len(shown.run(SHOWN)) == 1
    choose(shown, "plan", "fa4")
    assert shown.run(SHOWN) == []
    shown.run("document.querySelector('form button[type=reset]').click()")
    shown.run("new Promise(done => setTimeout(done, 50))")
    assert shown.run(SHOWN) == everything


def test_a_plan_filter_keeps_its_rows_and_dots_alone(shown):
    choose(shown, "plan", "TE:FP8")
    assert len(shown.run(SHOWN)) == 1
    rows = "[...new Set([...document.querySelectorAll('tr[data-plan]:not(.off)')].map(each => each.dataset.plan))]"
    assert shown.run(rows) == ["te:fp8>te:fp8"]


def test_the_budget_chooses_again(shown):
    assert won(shown, SQUARE)[0].startswith("fa3:fp8")
    lines = "[...document.querySelectorAll('.budget')].filter(each => getComputedStyle(each).display !== 'none').length"
    assert shown.run(lines) == 3
    choose(shown, "budget", "2")  # an error of 0.05
    assert won(shown, SQUARE)[0] == "fa3:bf16"
    assert won(shown, CAUSAL)[0] == "fa3:bf16"
    assert shown.run(lines) == 3


def test_a_cell_leads_to_its_case_by_keyboard_alone(shown):
    shown.run("document.querySelector('.map a').focus()")
    shown.press("Enter", 13)
    assert (
        shown.run(
            "new Promise(done => setTimeout(() => done(document.querySelectorAll('details.case[open]').length), 200))"
        )
        == 1
    )
    assert shown.run("document.activeElement.matches('details.case[open] > summary')")


def test_every_control_and_scrolling_table_is_reached_by_the_tab_key_and_has_a_name(shown):
    unnamed = shown.run("""['a', 'button', 'select', 'input', 'summary', '[tabindex="0"]', 'svg[role=img]']
        .flatMap(each => [...document.querySelectorAll(each)])
        .filter(each => !(each.textContent?.trim() || each.getAttribute('aria-label') || each.labels?.length))
        .map(each => each.outerHTML.slice(0, 80))""")
    assert unnamed == []
    assert shown.run("[...document.querySelectorAll('.scroll')].every(each => each.tabIndex === 0)")
    headless = "[...document.querySelectorAll('table')].filter(each => !each.querySelector('th[scope]')).length"
    assert shown.run(headless) == 0
    nameless = (
        "[...document.querySelectorAll('table')].filter(each => !each.caption && !each.closest('[aria-label]')).length"
    )
    assert shown.run(nameless) == 0


def test_a_row_s_plan_goes_into_the_command_of_its_case(shown):
    shown.run("document.querySelectorAll('details.case').forEach(each => each.open = true)")
    found = shown.run("""[...document.querySelectorAll('details.case')].map(each => {
        const said = [];
        for (const row of each.querySelectorAll('tr[data-plan]')) {
            row.querySelector('th button').click();
            said.push(each.querySelector('code[data-plan]').textContent.endsWith(`--backends '${row.dataset.plan}'`));
        }
        return said;
    }).flat()""")
    assert len(found) == 11
    assert all(found)


@pytest.mark.parametrize("width", [320, 390, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_window_and_the_colours_follow_it(browser, file, width, dark):
    browser.look(width, 800, dark)
    opened(browser, file)
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.run("document.documentElement.scrollWidth") <= width
    red, green, blue = browser.run("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
    assert (max(red, green, blue) < 60) == dark
    browser.run("document.getElementById('theme').click()")
    red, green, blue = browser.run("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
    assert (max(red, green, blue) < 60) != dark


def test_it_prints_light_without_controls_even_in_the_dark(browser, file):
    browser.look(1280, 800, dark=True)
    opened(browser, file)
    pdf = browser.print()
    assert pdf.startswith(b"%PDF-")
    browser.ask(
        "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not browser.run("document.forms[0].checkVisibility()")
    assert len(browser.run(SHOWN)) == 4
    browser.ask("Emulation.setEmulatedMedia", media="")


def test_a_file_full_of_markup_injects_nothing(browser, tmp_path):
    nasty = "</script><script>window.pwned=1</script><img src=x onerror=pwned=1>\"'><svg onload=pwned=1></style>"
    path = tmp_path / "nasty.html"
    path.write_text(page(told(nasty), registry()), encoding="utf-8")
    opened(browser, path)
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert (browser.complaints, browser.requests) == ([], [path.as_uri()])
    assert browser.run("[window.pwned === undefined, document.scripts.length, document.images.length]") == [True, 1, 0]
    assert browser.run(f"document.body.innerText.includes({nasty[:30]!r})")


def test_were_an_element_injected_the_policy_would_still_stop_it(browser, file, tmp_path):
    path = tmp_path / "injected.html"
    evil = "<script>window.pwned=1</script><img src='http://localhost:9/x.png' onerror='window.pwned=1'>"
    path.write_text(file.read_text(encoding="utf-8").replace("<main", f"{evil}<main", 1), encoding="utf-8")
    opened(browser, path)
    browser.run("new Promise(done => setTimeout(done, 200))")
    assert browser.run("window.pwned === undefined")
    assert all("Content Security Policy" in each for each in browser.complaints)
    assert browser.complaints
    assert len(browser.run(SHOWN)) == 4


def test_one_row_alone_is_a_page_too(browser, tmp_path):
    for number, results in enumerate((Results({"a": [row("fa3:bf16", 1.0)]}), Results({}, [run_of([3, 2, 1])]))):
        path = tmp_path / f"{number}.html"
        path.write_text(page(results, registry()), encoding="utf-8")
        opened(browser, path)
        assert (browser.complaints, browser.requests) == ([], [path.as_uri()])
