"""Errors of the command line: the exit code, and one clear line without a traceback."""

from pathlib import Path

import pytest
from command_line import SHAPE, attnbench, fails, fails_in_one_line

LONG = "9" * 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sweeep",), "No such command 'sweeep'"),
        (("backends", "--fromat", "json"), "No such option: --fromat"),
        (("explain", "--heads", "4"), "Missing option"),
        (("explain", *SHAPE, "--batch", "many"), "--batch"),
        (("sweep", "--dtype", "int8"), "int8"),
        (("table", "build", "nowhere"), "does not exist"),
        (("table", "show", "nowhere.json"), "does not exist"),
    ],
)
def test_misuse_of_options_exits_2(arguments: tuple[str, ...], message: str) -> None:
    fails(attnbench(*arguments), 2, message)


def test_what_is_missing_malformed_or_refused_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    refused = attnbench("explain", *SHAPE, "--backend", "sdpa-cudnn", "--device", "cpu")
    fails_in_one_line(refused, 1, "sdpa-cudnn", "Plans that can")
    (tmp_path / "measurements.jsonl").touch()
    fails_in_one_line(attnbench("table", "build", tmp_path), 2, "holds no measurement")
    table = tmp_path / "table.json"
    table.write_text('{\n"schema": }\n')
    fails_in_one_line(attnbench("table", "show", table), 2, f"{table}:2: expected JSON")
    fails_in_one_line(attnbench("table", "show"), 1, "attnbench sweep")
    unwritable = attnbench("sweep", "--device", "cpu", "--out", table / "results")
    fails_in_one_line(unwritable, 1, "cannot be written")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", *SHAPE, "--backend", "sdpa-flesh"), "did you mean sdpa-flash"),
        (("explain", *SHAPE, "--kv-heads", "3"), "must be a multiple of kv_heads (3)"),
        (("explain", *SHAPE, "--scale", "nan"), "scale must be a finite number"),
        (("explain", *SHAPE, "--window", "-1,0"), "must not be negative"),
        (("explain", *SHAPE, "--window", "16"), "expected LEFT,RIGHT"),
        (("backends", "--device", "abacus"), "not 'abacus'"),
        (("sweep", "--preset", "nowhere.yaml"), "nowhere.yaml"),
        (("sweep", "--preset", "fast"), "quick, inference, training, long"),
        (("sweep", "--device", "cpu", "--resume"), "--resume needs --out"),
        (("sweep", "--device", "cpu", "--dtype", "bf16", "--max-error", "0.1"), "--max-error applies to FP8 plans"),
        (("sweep", "--device", "cpu", "--max-error", "-1"), "positive"),
        (("sweep", "--device", "cpu", "--backends", ","), "--backends: no name given; expected"),
        (("sweep", "--device", "cpu", "--backends", "sdpa-flsh"), "sdpa-flash"),
        (("explain", *SHAPE, "--device", "cuda:99999999999999999999"), "a device is auto, cpu, cuda or cuda:N"),
        (("explain", *SHAPE, "--device", "cpu", "--window", f"{LONG},0"), "expected LEFT,RIGHT"),
        (("explain", *SHAPE, "--device", "cpu", "--softcap", "inf"), "softcap must be a finite number"),
        (("explain", *SHAPE, "--device", "cpu", "--backend", LONG), "no backend is named '999"),
        (("explain", *SHAPE, "--device", "cpu", "--backend", "\x1b[2J"), r"no backend is named '\x1b[2J'"),
        (("sweep", "--device", "cpu", "--max-error", "inf"), "expected a relative error of at most 1e+100"),
        (("sweep", "--device", "cpu", "--timeout", "inf"), "--timeout inf: expected at most 1e+06 seconds"),
        (("sweep", "--device", "cpu", "--case", LONG), "quick has no case '999"),
        (("train", "--price-per-hour", "inf"), "--price-per-hour inf: expected a positive price"),
        (("train", "--show", f"{LONG}=0"), "expected FOLDER or FOLDER=PRICE with a positive price"),
        (("train", "--show", "9" * 300), "cannot be read: File name too long"),
        (("capture", "--out", "x", LONG), "no such script: '999"),
        (("train", "--seed", str(2**70)), "seed: Input should be less than or equal to"),
        (("train", "--lr", "nan"), "lr: Input should be a finite number"),
        (("train", "--max-error", "inf"), "max_error: Input should be a finite number"),
        (("capture", "--out", "x", "--max-bytes", LONG, __file__), "expected a number of bytes"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_misuse_of_values_exits_2_with_one_short_line(arguments: tuple[str, ...], message: str) -> None:
    run = attnbench(*arguments)
    fails_in_one_line(run, 2, message)
    assert len(run.stderr) < 1000
