"""Training: the example loop, alone and on two ranks, and the gradients of models that two ranks train together."""

import io
import json
import os
import re
import runpy
import sys
from contextlib import redirect_stdout

import pytest
import ranks
import torch
from places import ROOT
from torchrun import torchrun_output

from attnbench.state import forget

EXAMPLE = ROOT / "examples" / "training-loop" / "train.py"
SMALL = ("--steps", 11, "--batch", 4, "--log-every", 5)
FP8 = ("--backend", "emulated", "--max-error", 0, *SMALL)


needs_ranks = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


def losses(*arguments, processes=1):
    """The losses that the example printed, by step."""
    if processes == 1:
        forget()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
            patch.setenv("XDG_CACHE_HOME", os.devnull)  # no table of the person who runs this
            patch.setattr(sys, "argv", [str(EXAMPLE), *map(str, arguments)])
            patch.setattr(torch.cuda, "is_available", lambda: False)
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        forget()
    printed = out.getvalue() if processes == 1 else torchrun_output(EXAMPLE, *arguments)
    assert re.search(r"attention was checked [1-9]\d* times, with 0 breaches of its error bound", printed)
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\d+\.\d+)", printed, re.MULTILINE)]


def choices(path):
    return {each["plan"] for each in json.loads(path.read_text())["choices"]}


@pytest.fixture(scope="module")
def fp8_run(tmp_path_factory):
    """The losses of a run with FP8 attention, and the file of its choices."""
    path = tmp_path_factory.mktemp("run") / "fp8.json"
    return losses(*FP8, "--choices", path), path


def test_fp8_attention_learns_as_bf16_does(fp8_run, tmp_path):
    found, path = fp8_run
    wide = losses("--attention", "bf16", "--choices", tmp_path / "bf16.json", *SMALL)
    assert len(wide) == 3
    assert wide[0] > 1.3 * wide[-1]
    assert found == pytest.approx(wide, rel=0.02)
    assert found != wide
    assert all(plan.startswith("sdpa-") for plan in choices(tmp_path / "bf16.json"))
    assert all(plan.startswith("emulated:fp8") for plan in choices(path))


@pytest.mark.exhaustive
def test_a_later_run_repeats_the_choices_of_the_file(fp8_run):
    found, path = fp8_run
    assert losses(*FP8, "--choices", path, "--missing", "raise") == found


@needs_ranks
@pytest.mark.exhaustive
def test_two_ranks_learn_like_one(fp8_run, tmp_path):
    assert losses(*FP8, "--choices", tmp_path / "two.json", processes=2) == pytest.approx(fp8_run[0], rel=0.02)
    assert len(choices(tmp_path / "two.json")) == 1


@pytest.fixture(scope="module")
def gradients_folder(tmp_path_factory):
    """The folder with the gradients of the ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks.run_ranks(ranks.__file__, [[str(rank), str(folder)] for rank in range(ranks.RANKS)], folder)
    return folder


@needs_ranks
@pytest.mark.parametrize("kind", ranks.KINDS)
def test_two_ranks_find_the_gradients_of_one(kind, gradients_folder):
    found = torch.load(gradients_folder / f"{kind}.pt")
    alone = [ranks.gradients(ranks.model(), x) for x in ranks.batches()]
    assert found.keys() == alone[0].keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, torch.stack([each[name] for each in alone]).mean(0), rtol=1e-5, atol=1e-7)
        assert gradient.abs().max() > 0
