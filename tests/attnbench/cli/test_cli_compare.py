"""``attnbench compare``: real files, its output and its exit codes."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from xml.etree import ElementTree

import pytest
from command_line import expect
from compared import passed_over, row, slowed, times, written
from row_facts import with_facts

MARKUP = 'é x" <script>alert(1)</script> | [a](b) & ]]> \x1b[31m \x00 \ud7ff \ufffe'


compare = partial(expect, "compare")


def document(*arguments, code=0):
    return json.loads(compare(*arguments, "--format", "json", code=code).stdout, parse_constant=pytest.fail)


def test_different_machines_exit_3_unless_compared_relative_to_a_baseline(tmp_path):
    rows = [row("a"), row("a", "sdpa-flash:bf16", seed=1)]
    base = written(tmp_path / "base", rows)
    away = replace(rows[0].environment, device_name="another GPU")
    far = written(tmp_path / "far", [each.model_copy(update={"environment": away}) for each in rows])
    done = compare(base, far, "--fail-on", "5%", code=3)
    assert "not comparable" in done.stdout.splitlines()[-1]
    (why,) = [line for line in done.stdout.splitlines() if "cannot be compared" in line]
    assert why == "- 2 rows cannot be compared (--all lists them): device_name was a GPU, is another GPU."
    assert "incomparable  a" not in done.stdout
    assert compare(base, far, "--all", code=3).stdout.count("incomparable  a") == 2
    by_ratios = document(base, far, "--fail-on", "5%", "--relative-to", "sdpa-flash:bf16")
    assert by_ratios["terms"]["relative_to"] == ["sdpa-flash:bf16"]
    alone = written(tmp_path / "alone", rows[:1])
    only = compare(alone, far, "--relative-to", "fa3:fp8", "--allow-missing", "*", code=3)
    assert "there is no row with numbers on both sides" in only.stdout  # the baseline is all that there is
    missing = compare(base, alone, "--fail-on", "5%", "--allow-missing", "a")
    assert "missing, allowed" in missing.stdout


def test_undetectable_slowdowns_are_uncertain_and_a_detectable_limit_is_offered(tmp_path):
    base, new = (
        written(tmp_path / name, [row(seed=seed), row("b", time_ms=times(seed + 1, spread=0.02))])
        for name, seed in (("base", 0), ("new", 5))
    )
    conclusion = compare(base, new, code=4).stdout.splitlines()[-1]
    pattern = (
        r"not certain: 2 of 2 rows could not have shown a slow-down of 3% \(([\d.]+)% to ([\d.]+)% would have been "
        r"found\), --fail-on (\d+)% would be certain; `attnbench gate` measures until it knows"
    )
    low, high, offered = map(float, re.fullmatch(pattern, conclusion).groups())
    assert 3 < low < high <= offered < high + 1
    found = document(base, new, code=4)
    assert (found["outcome"], found["conclusion"]) == ("uncertain", conclusion)
    assert [(each["verdict"], each["certain"]) for each in found["rows"]] == [("uncertain", False)] * 2
    visible = [each["visible"] for each in found["rows"]]
    assert (100 * min(visible), 100 * max(visible)) == pytest.approx((low, high), abs=0.1)
    clean = compare(base, new, "--fail-on", f"{offered:.0f}%").stdout.splitlines()[-1]
    assert clean.startswith("clean: nothing became slower, less accurate, failed or went missing")
    assert clean.endswith(f"; in any row {high}% would have been found with 95%")


def test_an_uncertain_row_that_may_be_slower_is_listed(tmp_path):
    rows = [row(case, seed=seed) for seed, case in enumerate("abcdefgh")]
    base, new = written(tmp_path / "base", rows), written(tmp_path / "new", [slowed(rows[0], 1.02), *rows[1:]])
    output = compare(base, new, "--fail-on", "1%", code=4).stdout
    assert [line.split()[:2] for line in output.splitlines() if line.startswith("uncertain")] == [["uncertain", "a"]]
    assert "- 1 of the uncertain may be slower: a cost's 95% interval lies above 0." in output.splitlines()


def test_the_text_output_reports_what_regressed_and_why(tmp_path):
    rows = [row(case, seed=seed) for seed, case in enumerate("abcdef")]
    slow, worse, _, far, *same = rows
    worse = with_facts(worse, error={"normal": {"out": 0.1, "lse": 1e-7}, "outlier": {"out": 0.08}})
    far = far.model_copy(update={"environment": replace(far.environment, device_name="NVIDIA H20")})
    base = written(tmp_path / "base", rows)
    new = written(tmp_path / "new", [slowed(slow, 1.5), worse, far, *same])
    output = compare(base, new, "--fail-on", "5%", "--format", "markdown", code=1).stdout
    listed = [[cell.strip() for cell in line.split("|")[1:4]] for line in output.splitlines() if line.startswith("|")]
    for case, verdict in {"a": "slower", "b": "inaccurate", "c": "missing", "d": "incomparable"}.items():
        assert any(case in cells and verdict in cells for cells in listed), output
    assert "kernel +50" in output
    assert "device_name was a GPU, is NVIDIA H20" in output.replace("\\", "")
    assert "regressed: 1 inaccurate, 1 slower, 1 missing" in output
    everything = compare(base, new, "--fail-on", "5%", "--all", code=1).stdout
    assert len(everything.splitlines()) > len(output.splitlines())


def test_junit_output_is_valid_xml_for_any_names(tmp_path):
    rows = [row(MARKUP), row("b", seed=1), row("c", seed=2), row("d", seed=3), passed_over("refused", "e")]
    base = written(tmp_path / "base", rows)
    far = replace(rows[2].environment, device_name=MARKUP)
    changed = [slowed(rows[0], 1.2), rows[1], rows[2].model_copy(update={"environment": far}), rows[4]]
    new = written(tmp_path / "new", changed)
    arguments = "--format", "junit", "--allow-missing", "d"
    text = compare(base, new, *arguments, "--fail-on", "5%", code=1).stdout
    assert text.startswith('<?xml version="1.0" encoding="UTF-8"?>\n')  # some readers of JUnit files ask for it
    assert text.isascii()
    root = ElementTree.fromstring(text)
    (suite,) = root
    for element in (root, suite):
        counted = [element.get(name) for name in ("tests", "failures", "errors", "skipped")]
        assert counted == ["5", "1", "1", "2"]
    tests = {test.get("classname"): test for test in suite}
    slow = tests[next(name for name in tests if "<script>alert(1)</script>" in name)]
    assert [(each.tag, each.get("type")) for each in slow] == [("failure", "slower")]
    assert slow[0].get("message").startswith("slower: kernel +")
    assert not list(tests["b"])
    assert [each.tag for each in tests["c"]] == ["error"]
    assert [each.tag for each in tests["d"]] == ["skipped"]
    assert [(each.tag, each.get("message")) for each in tests["e"]] == [("skipped", "unmeasured")]
    assert not set(text) & {"\x1b", "\x00", "\ufffe"}
    narrow = ElementTree.fromstring(compare(base, new, *arguments, "--fail-on", "1%", code=1).stdout)
    (unsure,) = [test for test in narrow[0] if test.get("classname") == "b"]
    assert unsure[0].tag == "skipped"
    assert unsure[0].get("message").startswith("uncertain: kernel ")


def test_json_output_states_the_terms_and_the_differences(tmp_path):
    before = row("a")
    now = replace(before.environment, torch="2.10.0")
    base = written(tmp_path / "base", [before, row("gone")])
    new = written(tmp_path / "new", [row("a", seed=1, environment=now)])
    limits = tmp_path / "limits.yaml"
    limits.write_text('"fa3:*": {time: 4%, host: 300%, error: 50%}\na: 6 %\n')
    on = "--fail-on", "2.5%", "--fail-on-host", "200%", "--thresholds", limits, "--cost", "call,kernel"
    found = document(base, new, *on, "--allow-missing", "gone")
    assert found["schema"] == "attnbench.comparison/2"
    assert found["terms"] == {
        "fail_on": 0.025, "fail_on_host": 2.0, "error_rise": 0.25, "memory_rise": 0.1, "costs": ["kernel", "call"],
        "relative_to": [], "allow_missing": ["gone"],
        "thresholds": {
            "fa3:*": {"time": 0.04, "host": 3.0, "error": 0.5, "memory": None},
            "a": {"time": 0.06, "host": None, "error": None, "memory": None},
        },
    }  # fmt: skip
    assert found["differences"] == ["torch was 2.9.0, is 2.10.0"]
    assert [each["torch"] for each in found["base"] + found["new"]] == ["2.9.0", "2.10.0"]
    only, gone = found["rows"]
    assert (gone["verdict"], gone["allowed"], only["allowed"]) == ("missing", True, False)
    assert found["counts"] == {"same": 1, "missing": 1}
    assert only["limits"] == {"time": 0.06, "host": 3.0, "error": 0.5, "memory": 0.1}
    assert (only["verdict"], only["certain"], only["regressed"]) == ("same", True, False)
    assert only["visible"] == max(cost["visible"] for cost in only["costs"].values()) < 0.06
    assert list(only["costs"]) == ["kernel", "call"]
    kernel = only["costs"]["kernel"]
    assert (kernel["visits"], kernel["limit"], kernel["decided_by"]) == ([8, 8], 0.06, "device")
    assert kernel["interval"][0] < kernel["ratio"] < kernel["interval"][1]


def test_json_output_has_the_numbers_of_base_before_those_of_new(tmp_path):
    error = {"normal": {"out": math.inf, "lse": 1e-7}, "outlier": {"out": 0.08}}
    before = row(memory_bytes=2**20)
    after = row(time_ms=times(1, ratio=2), error=error, memory_bytes=2**22, replayed=["kernel"])
    base, new = written(tmp_path / "base", [before]), written(tmp_path / "new", [after])
    (found,) = document(base, new, code=1)["rows"]
    assert found["errors"] == [{"family": "normal", "tensor": "out", "before": 0.05, "after": "Infinity"}]
    assert found["memory"] == {"peak": [2**20, 2**22]}
    low, high = found["costs"]["call"]["median"]
    assert low < high
    kernel, call = (found["costs"][cost] for cost in ("kernel", "call"))
    assert kernel["visible"] == "Infinity"
    assert (kernel["replayed_on_one_side"], call["replayed_on_one_side"]) == (True, False)


def test_missing_files_and_files_without_rows_are_misuse(base, tmp_path):
    assert "nowhere" in compare(base, tmp_path / "nowhere", code=2).stderr
    assert "no measurement" in compare(base, written(tmp_path / "empty", []), code=2).stderr
    broken = written(tmp_path / "broken", [])
    (broken / "measurements.jsonl").write_text("{}")
    assert "measurements.jsonl:1:" in compare(base, broken, code=2).stderr


@pytest.fixture
def base(tmp_path):
    return written(tmp_path / "base", [row()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fail-on", "3"], "percentage"),
        (["--cost", "kernels"], "'kernels'"),
        (["--allow-missing", "misspelt"], "'misspelt' matches no case"),
        (["--relative-to", "misspelt:bf16"], "misspelt:bf16"),
        (["--thresholds", "none.yaml"], "none.yaml"),
    ],
)
def test_misuse_exits_2_with_a_message(base, options, message):
    done = compare(base, base, *options, code=2)
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "expected lines"),
        ("{}\n", 1, "expected lines"),
        ("a: {}\n", 1, "time, host, error or memory"),
        ("a: 5%\n\nb: lots\n", 3, "percentage"),
        ("a: 5%\na: 6%\n", 2, "once"),
        ("a: {time: 5%,\n speed: 6%}\n", 2, "time, host, error or memory"),
        ("a: 5%\nb: {time: 5%\n", 3, "YAML"),
        ("misspelt: 5%\n", None, "'misspelt' matches no case"),
    ],
)
def test_a_threshold_file_is_validated(base, tmp_path, text, line, message):
    file = tmp_path / "limits.yaml"
    file.write_text(text)
    stderr = compare(base, base, "--thresholds", file, code=2).stderr
    assert message in stderr
    if line is not None:
        assert f"limits.yaml:{line}:" in stderr
