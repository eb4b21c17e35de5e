"""Parts of a sweep for the tests of `attnbench merge`, and the assertion for refused merges."""

import math
from datetime import datetime, timezone

import pytest
from fakes import an_environment
from row_facts import measurement

from attnbench.harness.results.condense import condense
from attnbench.harness.results.merge import merge
from attnbench.harness.results.store import Store
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.table import Table

HERE = an_environment(device_type="cuda", device_name="a GPU", capability="9.0", cuda="13.0", backends={"fa3": "1.0"})
WHEN = datetime(2026, 11, 20, tzinfo=timezone.utc)
PLANS = [Plan("fa3:fp8"), Plan("sdpa-flash:bf16"), Plan("cudnn:fp8"), Plan("te:fp8")]
NUMBERS = {
    "status": "ok", "time_ms": {"kernel": [1.0], "call": [2.0, 3.0]}, "error": {"normal": {"out": 0.05, "lse": 0.0}},
    "bound": 0.12, "declared_error": 0.06, "truth": "all of it", "timer": "events", "drawn_on": "cuda",
}  # fmt: skip


def spec(number):
    return AttentionSpec.make(batch=1, heads=2, seqlen_q=64 + number, head_dim=16)


def row(number, plan=PLANS[0], **changes):
    facts = {"case": f"case {number}", "spec": spec(number), "plan": plan, "started": WHEN, "environment": HERE}
    numbers = {"status": changes["status"], "reason": "so it is"} if changes.get("status") else NUMBERS
    return measurement(**{**facts, **numbers, **changes})


def part(folder, rows, finished=True):
    """The folder of a sweep that finished, or was stopped between two rows."""
    with Store(folder, HERE) as store:
        for each in rows:
            store.append(each)
    if finished:
        Table.from_entries(HERE, condense(rows)).save(folder / "table.json")
    return folder


def parts(tmp_path, *rows):
    """One numbered part for each list of rows."""
    return [part(tmp_path / f"part-{index:04d}-of-{len(rows):04d}", each) for index, each in enumerate(rows)]


def file_contents(folder):
    """The content and modification time of every file below the folder."""
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.rglob("*") if file.is_file()}


def assert_merge_refused(kind, message, out, sources, **options):
    """The merge raises this error, creates no file and changes none."""
    everything = file_contents(out.parent)
    folders = set(out.parent.iterdir())
    with pytest.raises(kind, match=f"(?s){message}"):
        merge(out, sources, **options)
    assert file_contents(out.parent) == everything
    assert set(out.parent.iterdir()) == folders


ROWS = [row(number, plan, **changes) for number in range(4) for plan, changes in (
    (PLANS[0], {}),
    (PLANS[1], {"status": "inaccurate", **{key: value for key, value in NUMBERS.items() if key != "status"},
                "error": {"normal": {"out": math.inf}}, "reason": "too far off"}),
    (PLANS[2], {"status": "refused"}),
    (PLANS[3], {"status": "slower", "timer": "events", "time_ms": {}}),  # predicted, not measured
)]  # fmt: skip
