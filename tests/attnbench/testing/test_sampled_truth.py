"""Exact attention of a few rows equals the same rows of the full result."""

import pytest
import torch

from attnbench import AttentionSpec, Mask
from attnbench.harness.cases.inputs import draw
from attnbench.kernels.registry import registry
from attnbench.testing import sampled_truth as module
from attnbench.testing.conformance.subject import Subject, exact_of, truth_of
from attnbench.testing.sampled_truth import sampled, sampled_truth

CPU = torch.device("cpu")
MASKS = (Mask(), Mask(right=0), Mask(right=0, alignment="bottom-right"), Mask(3, 20))
SPECS = [
    AttentionSpec.make(
        batch=2, heads=4, kv_heads=2, seqlen_q=queries, seqlen_kv=keys, head_dim=8, mask=mask, softcap=2.0,
        direction="training",
    )
    for mask in MASKS
    for queries, keys in ((5, 5), (97, 97), (16, 130), (130, 16), (61, 130))
]  # fmt: skip


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.has_empty_rows], ids=str)
def test_sampled_rows_equal_those_of_the_full_result(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_SCORES", {"cpu": 2000})  # several slices of queries
    inputs = draw(spec, "normal", CPU)
    whole = truth_of(Subject(None, CPU, registry()), spec, inputs)
    found = sampled_truth(spec, inputs, 16)
    assert found.keys() == {"out", "dq", "dk", "dv"}
    for name, value in found.items():
        torch.testing.assert_close(value, sampled(name, exact_of(whole, name), 16), rtol=1e-11, atol=1e-13)
