"""Rows for reports: any plan on any spec, with the time, error and environment that the test gives."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser

from fakes import an_environment
from row_facts import measurement, with_facts
from small_training import run_of

from attnbench.harness.report.page.results import Results
from attnbench.harness.results.records import Measurement
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
GPU = an_environment(device_type="cuda", device_name="A GPU", capability="9.0", torch="2.11.0", backends={})
SQUARE = AttentionSpec.make(batch=2, heads=16, seqlen_q=1024, head_dim=128)
CAUSAL = AttentionSpec.make(
    batch=1, heads=8, kv_heads=2, seqlen_q=2048, head_dim=64, mask=SQUARE.mask.__class__(right=0)
)
LEARNT = SQUARE.replace(direction="training")


def row(plan: str, ms: float, error: float = 0.002, spec: AttentionSpec = SQUARE, **changes) -> Measurement:
    """A measured row whose samples vary by a tenth of a percent; changes are validated like the rows of a file."""
    draw = random.Random(plan)
    samples = [ms * draw.uniform(0.999, 1.001) for _ in range(20)]
    parsed = Plan.parse(plan)
    quick = [each * 0.5 for each in samples]
    costs = {"kernel": quick, "prepared": [each * 0.8 for each in samples], "call": samples}
    tensors = ("out", "dq", "dk", "dv") if spec.training else ("out",)
    errors = {family: dict.fromkeys(tensors, error) for family in ("normal", "outlier")}
    facts = {
        "case": str(spec),
        "spec": spec,
        "plan": parsed,
        "status": "ok",
        "time_ms": costs | ({"backward": quick} if spec.training else {}),
        "error": errors,
        "floor": errors if parsed.fp8 else {},
        "bound": 0.12 if parsed.fp8 and not spec.training else 0.2 if parsed.fp8 else 0.01,
        "declared_error": 0.1,
        "truth": "exact attention in fp64",
        "timer": "a timer",
        "drawn_on": "cuda",
        "peak_share": 0.5,
        "memory_bytes": 2**20,
        "started": BEGAN,
        "environment": GPU,
    }
    return Measurement.model_validate_json(measurement(**facts | changes).to_line())


def failed_row(plan: str, status: str, reason: str, spec: AttentionSpec = SQUARE, **changes) -> Measurement:
    """A row without measurements."""
    facts = {"case": str(spec), "started": BEGAN, "environment": GPU} | changes
    made = Measurement(spec=spec, plan=Plan.parse(plan), status=status, reason=reason, **facts)
    return Measurement.model_validate_json(made.to_line())


def at_later_time(made: Measurement, hours: float = 1) -> Measurement:
    return made.model_copy(update={"started": made.started + timedelta(hours=hours)})


def in_environment(made: Measurement, **facts) -> Measurement:
    """The row in an environment with other facts."""
    return made.model_copy(update={"environment": replace(made.environment, **facts)})


def sweep_rows() -> list[Measurement]:
    """Rows in which FP8 wins one forward case, loses another, and is fast but inaccurate in training."""
    return [
        row("fa3:bf16", 1.0),
        row("fa3:fp8", 0.5, 0.08),
        row("flex:fp8", 0.4, 0.3, status="inaccurate", reason="the error of out is 0.3, beyond 0.12", check="error"),
        failed_row("te:fp8", "refused", "takes no tensors of this size"),
        failed_row("fa4:bf16", "crashed", "the process ended by signal 11; its last line"),
        row("fa3:bf16", 1.0, spec=CAUSAL),
        row("fa3:fp8", 1.5, 0.08, spec=CAUSAL),
        row("fa4:bf16>fa4:bf16", 3.0, 0.004, spec=LEARNT),
        row("te:fp8>te:fp8", 2.0, 0.5, spec=LEARNT, status="inaccurate", reason="beyond 0.2", check="error"),
        row("fa3:fp8>fa4:bf16", 4.0, 0.1, spec=LEARNT),
    ]


def hostile_results(text: str) -> Results:
    """Results with ``text`` in every free text field."""
    short = text[:50]
    environment = GPU.to_dict() | dict.fromkeys(
        ("torch", "python", "platform", "cpu", "attnbench", "device_name"), text
    )
    environment |= {"driver": text, "cuda": text, "cudnn": text, "triton": text, "capability": text}
    environment |= {"backends": {f"z{text}": text}, "origins": {f"z{text}": text}}
    here = type(GPU).from_dict(environment)

    def with_text(made: Measurement, **more) -> Measurement:
        hostile = with_facts(made, environment=here, case=text, **more)
        return Measurement.model_validate_json(json.dumps(hostile.to_dict()))

    odd = {f"z{text}": {"out": 0.2}}
    rows = [
        with_text(row("fa3:bf16", 1.0), truth=text, timer=text, ran={"forward": [text]}),
        with_text(row("fa3:fp8", 0.5, 0.08), error={**odd, "outlier": {"out": 0.08}}, floor=odd),
        with_text(row("flex:fp8", 0.4, 0.3), status="inaccurate", reason=text, check=short),
        with_text(failed_row("te:fp8", "refused", "x"), reason=text),
        with_text(failed_row("fa4:bf16", "crashed", "x"), reason=text),
        with_text(row("fa4:bf16>fa4:bf16", 3.0, 0.004, spec=LEARNT)),
    ]
    settings = dict.fromkeys(("model", "size", "data", "linears", "policy"), text)
    runs = [
        run_of([3, 2, 1], role, environment=here, flops_model=text, settings=settings | {
            "attention": f"{role} {text}", "seed": 0, "steps": 3, f"a{short[:40]}": text})
        for role in ("candidate", "baseline")
    ]  # fmt: skip
    broken = run_of([3, 2, 1], seed=1, environment=here, status="error", reason=text)
    return Results({text: rows}, [*runs, broken])


class Structure(HTMLParser):
    """A page parsed as HTML: ``tags`` with the names of their attributes, texts and comments."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.comments: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        self.tags.append((f"/{tag}", ()))

    def handle_data(self, data):
        self.texts.append(data)

    def handle_comment(self, data):
        self.comments.append(data)
