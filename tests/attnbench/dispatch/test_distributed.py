"""attention in models that two processes train together, over gloo on the CPU."""

from pathlib import Path

import pytest
import ranks
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@pytest.fixture(scope="module")
def gradients_folder(tmp_path_factory) -> Path:
    """The folder with the gradients of the ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks.run_ranks(ranks.__file__, [[str(rank), str(folder)] for rank in range(ranks.RANKS)], folder)
    return folder


@pytest.mark.parametrize("kind", ranks.KINDS)
def test_two_ranks_find_the_gradients_of_one(kind, gradients_folder):
    found = torch.load(gradients_folder / f"{kind}.pt")
    alone = [ranks.gradients(ranks.model(), x) for x in ranks.batches()]
    assert found.keys() == alone[0].keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, torch.stack([each[name] for each in alone]).mean(0), rtol=1e-5, atol=1e-7)
        assert gradient.abs().max() > 0
