"""Packed and padded calls are captured with their lengths, and become cases that ask what was asked."""

import pytest
import torch

import attnbench
from attnbench.errors import InputError, MalformedFileError
from attnbench.harness.capture.file import read_captured
from attnbench.harness.capture.recorder import capture
from attnbench.harness.cases.file import read_captured_cases
from attnbench.harness.cases.inputs import draw
from attnbench.harness.sequence_lengths import SequenceLengths

CPU = torch.device("cpu")
STARTS = torch.tensor([0, 9, 9, 40], dtype=torch.int32)
USED = torch.tensor([3, 8], dtype=torch.int32)


def packed(q, kv):
    return attnbench.attention(q, kv, kv, layout="thd", cu_seqlens_q=STARTS, is_causal=True, max_seqlen_q=37)


def test_what_was_captured_is_measured_with_the_lengths_that_it_had(tmp_path):
    file = tmp_path / "acts.safetensors"
    q, kv = torch.randn(40, 4, 16, dtype=torch.bfloat16), torch.randn(40, 2, 16, dtype=torch.bfloat16)
    rows = torch.randn(2, 2, 8, 16, dtype=torch.bfloat16)
    leaf = q.clone().requires_grad_()
    with capture(file) as recorder:
        packed(leaf, kv).sum().backward()
        attnbench.attention(rows, rows, rows, kv_lengths=USED, padding_side="left")
        packed(q, kv)
        empty = torch.tensor([0, 8, 8], dtype=torch.int32)
        attnbench.attention(
            q[:8], kv[:4], kv[:4], layout="thd", cu_seqlens_q=empty, cu_seqlens_kv=torch.tensor([0, 0, 4]).int()
        )
    assert (recorder.seen, recorder.recorded) == (4, 3)
    assert recorder.left_out == ["1 not recorded: sequences that are too many, or of which none has a query and a key"]
    training, padded, forward = cases = read_captured_cases(file, "fp8")
    assert training.lengths == forward.lengths == SequenceLengths(layout="packed", q=(9, 0, 31))
    assert padded.lengths == SequenceLengths(layout="left-padded", q=(8, 8), kv=(3, 8))
    assert (
        training.spec
        == attnbench.explain(leaf, kv, kv, layout="thd", cu_seqlens_q=STARTS, is_causal=True, max_seqlen_q=37).spec
    )
    x = draw(training.spec, training.families[0], CPU, training.lengths)
    assert torch.equal(x.q[0].transpose(0, 1), q)
    assert x.q[0].transpose(0, 1).is_contiguous()
    assert torch.equal(x.grad_out, torch.ones_like(x.q))
    assert torch.equal(x.lengths.q, STARTS)
    assert all(draw(case.spec, "normal", CPU, case.lengths).lengths is not None for case in cases)
    with pytest.raises(InputError, match="other lengths"):
        draw(training.spec, training.families[0], CPU, SequenceLengths(layout="packed", q=(9, 1, 30)))


def test_lengths_that_do_not_fit_their_call_are_reported(tmp_path):
    file = tmp_path / "acts.safetensors"
    x = torch.randn(40, 2, 16, dtype=torch.bfloat16)
    with capture(file):
        packed(x, x)
    broken = file.read_bytes().replace(b'\\"q\\":[9,0,31]', b'\\"q\\":[9,0,99]')
    file.write_bytes(broken)
    with pytest.raises(MalformedFileError, match="lengths of the sequences make"):
        read_captured(file)
