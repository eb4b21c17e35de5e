"""attention over sequences that several ranks share, against exact attention of the whole; gloo on the CPU."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import ring_ranks
import torch
from patience import PATIENCE
from places import RESULTS, ROOT, SUPPORT
from torchrun import torchrun_output

from attnbench import AttentionSpec
from attnbench.dispatch import ring
from attnbench.dispatch.ring_parts import part_at, parts_of, places
from attnbench.errors import InputError, RefusedError
from attnbench.integrations.context_parallel import explain

PARTS = ("own keys", "an earlier rank's keys", "a later rank's keys")
# Of out and gradients; the log-sum-exp's is smaller.
LARGEST = {"fp32": 1e-6, "bf16": 5e-3, "e4m3": 0.08, "mixed": 0.07, "rows first": 1e-6}
SENT = {"fp32": "fp32", "bf16": "bf16", "e4m3": "e4m3", "mixed": "e4m3", "rows first": "fp32"}


def results_of(size, folder, *thorough):
    command = [sys.executable, ring_ranks.__file__, str(size), str(folder), *thorough]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": SUPPORT, "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(
    scope="module",
    params=[
        (2,),
        pytest.param((2, "thorough"), marks=pytest.mark.exhaustive),
        pytest.param((4, "thorough"), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def ring_results(request, tmp_path_factory):
    """The results of each rank, by name."""
    return results_of(request.param[0], tmp_path_factory.mktemp("ring"), *request.param[1:])


def test_sharded_results_agree_with_exact_attention_of_the_whole_sequence(ring_results):
    for own in ring_results:
        for name, largest in LARGEST.items():
            for each in (own[name], own.get(f"{name} whole", own[name])):
                assert max(each[tensor] for tensor in ring_ranks.TENSORS) < largest, (name, each)
        assert {name: own[name]["sent"] for name in LARGEST} == SENT
        rotated = own.get("rotated", own["e4m3"])  # Q and K, by kernels that take them so
        assert rotated["sent"] == "e4m3"
        assert max(rotated[tensor] for tensor in ring_ranks.TENSORS) < LARGEST["e4m3"]


def test_ranks_with_different_arguments_get_an_error(ring_results):
    for own in ring_results:
        assert "s8 d16" in own["unequal lengths"]
        assert "s10 d16" in own["unequal lengths"]
        assert own["unequal lengths"].startswith("PeerError: ranks that share sequences must ask the same")
        assert "s8 d16" in own["late"]
        assert "s12 d16" in own["late"]
        assert "sdpa-flash:fp32" in own["another plan"]
        assert "reference:fp32" in own["another plan"]
    assert ring_results[-1]["one refuses"].startswith("RefusedError: fa3")
    assert "rank 1: cannot: fa3" in ring_results[0]["one refuses"]


def test_a_rank_that_crashed_is_an_error_not_a_hang(ring_results):
    for message in ring_results[0]["crashed"]:
        assert message.startswith(f"PeerError: rank 0 of {len(ring_results)} had no answer from another rank")


def test_calls_that_no_ring_serves_are_refused(ring_results):
    for own in ring_results:
        assert own["window"].startswith("InputError: windows, sinks and descales are not served")
        assert own["odd"].startswith("InputError: a rank holds two equal pieces")
        assert own["explain"].startswith("InputError: over several ranks each step has a plan")
        assert own["choices"] == dict.fromkeys(PARTS, "sdpa-flash:fp32")
    assert ring_results[0]["outside"].startswith("InputError: this process is no rank")
    assert ring_results[-1]["alone"] == 0.0


def test_buffers_are_sharded_as_torch_does(ring_results):
    seen = [own["buffers"] for own in ring_results]
    assert sorted(token for each in seen for token in each["inside"]) == list(range(16))
    assert seen[0]["inside"] == [*range(16 // (2 * len(seen))), *range(16 - 16 // (2 * len(seen)), 16)]
    for each in seen:
        assert each["after"] == list(range(16))
        assert each["lost"] == each["inside"]
        for what, message in each["wrong"].items():
            assert message.startswith("InputError"), (what, message)


def test_fsdp_and_checkpointing_train_on_the_ring(ring_results):
    for own in ring_results:
        assert own["composed"] < 1e-5
        assert own.get("composed, compiled", 0.0) < 1e-5


def test_calls_of_torchs_sdpa_attend_over_the_ranks(ring_results):
    for own in ring_results:
        assert own["through sdpa"]["served"] == 1
        assert own["through sdpa"]["error"] < 1e-6


def test_models_of_transformers_share_tokens_and_positions(ring_results):
    for each in (own["llama"] for own in ring_results if "llama" in own):
        assert each["error"] < 1e-5
    message = ring_results[0].get("llama", {"split": "InputError: sequences of unequal length"})["split"]
    assert message.startswith("InputError: sequences of unequal length")


def test_plans_can_be_explained_without_running_ranks():
    q = torch.randn(1, 4, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    found = explain(q, q[:, :2], q[:, :2], ranks=2, is_causal=True, backend="emulated:fp8")
    assert tuple(found) == PARTS
    specs = [each.spec for each in found.values()]
    assert [(spec.seqlen_q, spec.seqlen_kv, spec.mask.kind) for spec in specs] == [
        (8, 8, "causal"), (8, 4, "none"), (4, 8, "none"),
    ]  # fmt: skip
    assert all(spec.partial and spec.training and str(spec).endswith("partial training") for spec in specs)
    assert AttentionSpec.from_dict(specs[1].to_dict()) == specs[1]
    with pytest.raises(RefusedError, match="computes no gradients from a given log-sum-exp, as those of a part"):
        explain(q, q, q, ranks=2, backend="sdpa-math")
    with pytest.raises(InputError, match="no context_parallel is open"):
        explain(q, q, q)


def test_a_training_of_shared_samples_has_the_losses_of_one_rank(ring_results):
    for losses in (own["losses"] for own in ring_results if "losses" in own):
        assert losses["shared"] == pytest.approx(losses["alone"], rel=1e-5)
    for message in (own["torch's ring"] for own in ring_results if "torch's ring" in own):
        assert "_scaled_dot_product_flash_attention_for_cpu" in message


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_the_parts_cover_every_visible_pair_once(size, causal):
    length = 4 * size
    seen = torch.zeros(length, length, dtype=torch.int)
    for rank in range(size):
        for step in range(size):
            part = part_at(step, rank, causal)
            assert part in parts_of(causal, size)
            queries, keys = (places(length, size, each % size, "cpu") for each in (rank, rank - step))
            queries = queries[len(queries) // 2 :] if part.half_q else queries
            keys = keys[: len(keys) // 2] if part.half_kv else keys
            pairs = torch.ones(len(queries), len(keys), dtype=torch.int)
            seen[queries[:, None], keys] += pairs.tril() if part.causal else pairs
    whole = torch.ones(length, length, dtype=torch.int)
    assert torch.equal(seen, whole.tril() if causal else whole)
    with pytest.raises(InputError, match=f"a multiple of {2 * size} tokens"):
        places(2 * size + 1, size, 0, "cpu")


def test_every_sent_gradient_is_returned():
    """Of four ranks, whose earlier and later ones differ by the direction around the ring."""
    size, sent, awaited = 4, {}, {}
    for rank, step in product(range(size), range(1, size)):
        keys = torch.zeros(1, 1, 4 if part_at(step, rank, True).half_kv else 8, 2)

        def send_home(step, gradients, numbers, rank=rank):
            sent[step, (rank - step) % size], awaited[step, rank] = gradients.numel(), numbers

        whole = torch.zeros(1, 1, 8, 2)
        group = SimpleNamespace(rank=rank, size=size, send_home=send_home)
        ring._Home(group, whole, whole).send(step, True, keys, keys)
    assert awaited == sent


@pytest.mark.exhaustive
def test_the_documented_example_runs(tmp_path):
    page = (ROOT / "docs" / "how-to/context-parallel.md").read_text(encoding="utf-8")
    (tmp_path / "shared.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    output = torchrun_output("shared.py", folder=tmp_path)
    assert output.count("torch.Size([1, 8, 128, 64]) Counter({'bf16': 1})") == 2
    errors = [float(each) for each in re.findall(r"tensor\((\d\.\d+)", output)]
    assert len(errors) == 2
    assert max(errors) < 0.01


@pytest.mark.exhaustive
def test_the_two_gpu_script_measures_and_reports_what_torch_cannot_do(tmp_path):
    small = "--lengths 64 --heads 4 --kv-heads 2 --head-dim 32 --fp8 emulated:fp8 --repeat 1 --out ring.json"
    output = torchrun_output(RESULTS / "ring.py", *small.split(), folder=tmp_path)
    found = json.loads((tmp_path / "ring.json").read_text())
    rows = {row["what"]: row for row in found["rows"]}
    assert [rows[name]["sent"] for name in ("bf16, ring", "fp8, ring")] == [["bf16"], ["e4m3"]]
    assert max(rows["bf16, ring"]["error"].values()) < 0.01 < min(rows["fp8, ring"]["error"].values()) < 0.08
    assert rows["torch flash, ring"]["status"] == "error"
    assert found["ratios"][0]["scaling fp8"] > 0
    assert "emulated:fp8>emulated:fp8" in output
