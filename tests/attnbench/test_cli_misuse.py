"""What the command line says of a mistake: the exit code, and one clear line without a traceback."""

from pathlib import Path

import pytest
from command_line import SHAPE, attnbench, fails, named


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sweeep",), "No such command 'sweeep'"),
        (("backends", "--fromat", "json"), "No such option: --fromat"),
        (("explain", "--heads", "4"), "Missing option"),
        (("explain", *SHAPE, "--dtype", "int3"), "'int3' is not one of"),
        (("explain", *SHAPE, "--batch", "many"), "--batch"),
        (("table", "build", "nowhere"), "does not exist"),
        (("table", "show", "nowhere.json"), "does not exist"),
    ],
)
def test_misuse_of_options_exits_2(arguments: tuple[str, ...], said: str) -> None:
    fails(attnbench(*arguments), 2, said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explain", *SHAPE, "--backend", "sdpa-flesh"), "did you mean sdpa-flash"),
        (("explain", *SHAPE, "--backend", "referense:fp32"), "did you mean reference"),
        (("explain", *SHAPE, "--kv-heads", "3"), "must be a multiple of kv_heads (3)"),
        (("explain", *SHAPE, "--scale", "nan"), "scale must be a finite number"),
        (("explain", *SHAPE, "--window", "-1,0"), "must not be negative"),
        (("explain", *SHAPE, "--window", "16"), "a window is LEFT,RIGHT"),
        (("explain", *SHAPE, "--window", "1,2,3"), "a window is LEFT,RIGHT"),
        (("explain", *SHAPE, "--max-error", "0"), "max_error must be a positive"),
        (("explain", *SHAPE, "--device", "tpu:7"), "tpu:7"),
        (("backends", "--device", "abacus"), "not 'abacus'"),
        (("sweep", "--backends", "sdpa-flesh"), "did you mean sdpa-flash"),
        (("sweep", "--preset", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_misuse_of_values_exits_2_with_one_line(arguments: tuple[str, ...], said: str) -> None:
    named(attnbench(*arguments), 2, said)


def test_a_named_backend_that_refuses_exits_1_with_reasons_and_alternatives() -> None:
    named(attnbench("explain", *SHAPE, "--backend", "sdpa-cudnn", "--device", "cpu"), 1, "sdpa-cudnn", "Plans that can")


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"schema": "attnbench.measurement/1"}', '{"schema": "other/1"}', "\x00\xff", "[" * 100_000]
)
def test_a_malformed_results_file_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    results = tmp_path / "measurements.jsonl"
    results.write_text(line + "\n")
    for path in (results, tmp_path):
        named(attnbench("table", "build", path, "-o", tmp_path / "table.json"), 2, f"{results}:1: expected")
    assert not (tmp_path / "table.json").exists()


def test_results_without_a_measurement_are_misuse(tmp_path: Path) -> None:
    (tmp_path / "measurements.jsonl").touch()
    named(attnbench("table", "build", tmp_path), 2, "holds no measurement")


def test_a_malformed_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text('{\n"schema": }\n')
    named(attnbench("table", "show", tmp_path / "table.json"), 2, f"{tmp_path / 'table.json'}:2: expected JSON")


def test_no_table_yet_says_how_to_make_one() -> None:
    named(attnbench("table", "show"), 1, "attnbench sweep")


def test_an_unwritable_output_folder_exits_1(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    named(attnbench("sweep", "--device", "cpu", "--out", tmp_path / "file" / "results"), 1, "cannot be written")
