"""Measurements of ``attnbench train`` on a GPU: attention's kernels, events for clocks, memory, and a resumed run."""

from pathlib import Path

import pytest
import torch

from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.run.parallel import Ranks
from attnbench.harness.training.run.session import Session, plan_runs
from attnbench.harness.training.run.trainable import build


def _rows(folder: Path, steps: int = 24, **settings):
    config = TrainConfig.make(size="tiny", seqlen=1024, batch=4, steps=steps, **settings)
    ranks = Ranks(torch.device("cuda", 0))
    with Session(folder, ranks, checkpoint_every=5) as session:
        return session.run(plan_runs(config, None, 1), build, lambda row: None)


@pytest.mark.parametrize("settings", [{}, {"checkpointing": True}, {"compile": True}, {"attention": "sdpa-flash"}])
def test_attention_kernels_are_identified_in_the_profile(tmp_path: Path, settings: dict) -> None:
    (row,) = _rows(tmp_path, **settings)
    assert row.status == "ok"
    assert row.attention is not None
    assert 0.01 < row.attention.share < 0.9
    assert 1 < row.attention.backward_ms / row.attention.forward_ms < 6
    assert any("flash" in name or "fmha" in name or "cudnn" in name for name in row.attention.kernels)
    assert row.attention.busy_ms < 2 * row.median_ms
    assert row.memory_bytes > 2**20
    assert all(taken > 0 for taken in row.step_ms)
    assert [sign.step for sign in row.signs] == [0, 12, 23]


def test_offloaded_inputs_save_memory_and_give_the_same_losses(tmp_path: Path) -> None:
    settings = {"seqlen": 8192, "layers": 8, "attention": "sdpa-flash", "checkpointing": True}
    rows = {}
    for offload in (False, True):
        config = TrainConfig.make(size="tiny", batch=4, steps=4, offload=offload, **settings)
        with Session(tmp_path / str(offload), Ranks(torch.device("cuda", 0))) as session:
            (rows[offload],) = session.run(plan_runs(config, None, 1), build, lambda row: None)
    assert rows[True].loss == pytest.approx(rows[False].loss, rel=1e-3)
    inputs = 8 * 4 * 8192 * 128 * 4  # of the blocks, fp32 under autocast
    assert rows[False].memory_bytes - rows[True].memory_bytes > inputs / 2


def test_longer_sequences_spend_more_of_a_step_in_attention(tmp_path: Path) -> None:
    shares = []
    for seqlen in (512, 4096):
        config = TrainConfig.make(size="tiny", seqlen=seqlen, batch=8192 // seqlen, steps=24, attention="sdpa-flash")
        with Session(tmp_path / str(seqlen), Ranks(torch.device("cuda", 0))) as session:
            (row,) = session.run(plan_runs(config, None, 1), build, lambda row: None)
        shares.append(row.attention.share)
    assert shares[1] > 1.5 * shares[0]


def test_a_diverging_run_ends_despite_delayed_reading_of_losses(tmp_path: Path) -> None:
    (row,) = _rows(tmp_path, steps=60, lr=1e30, grad_clip=0.0, warmup=0)
    assert row.status == "diverged"
    assert 5 <= len(row.loss) < 40
