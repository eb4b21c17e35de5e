"""Tables whose times follow a formula, and the plans that they contain, for the tests of regret."""

from fakes import FakeBackward, FakeForward, an_environment, fake_backend, fake_registry

from attnbench import AttentionSpec, Mask, Plan
from attnbench.tables.table import Entry, Table

KNOWN = fake_registry(
    fake_backend("near", FakeForward("near:bf16", preference=10), FakeBackward("near:bf16")),
    fake_backend("far", FakeForward("far:bf16", preference=20), FakeForward("far:fp8"), FakeBackward("far:bf16")),
    fake_backend("sdpa-flash", FakeForward("sdpa-flash:bf16"), FakeBackward("sdpa-flash:bf16"), sdpa_order=1),
    fake_backend("sdpa-cudnn", FakeForward("sdpa-cudnn:bf16"), FakeBackward("sdpa-cudnn:bf16"), sdpa_order=0),
)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = (Mask(), Mask(right=0))
# (launch ms, ms per tera-operation, error) of a plan with a short launch and a low rate, its opposite, and an FP8 plan.
FORMULAS = {"near:bf16": (0.02, 2.0, 0.002), "far:bf16": (0.2, 1.5, 0.002), "far:fp8": (0.3, 1.0, 0.06)}


def spec(length: int, **more) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 16384 // length, "heads": 16, "seqlen_q": length, "head_dim": 128, **more})


SPECS = [spec(length, mask=mask) for length in LENGTHS for mask in MASKS]


def entry(at: AttentionSpec, plan: str, time: float, error: float) -> Entry:
    return Entry(at, Plan.parse(plan), "ok", time, 0.002 * time, {"outlier": error})


def formula_table(laws=FORMULAS, specs=SPECS) -> Table:
    entries = (
        entry(at, plan, launch + rate * at.flops / 1e12, error)
        for at in specs
        for plan, (launch, rate, error) in laws.items()
    )
    return Table.from_entries(an_environment(), entries)
