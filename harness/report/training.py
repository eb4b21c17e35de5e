"""What a folder of training runs shows to a browser: its loss as a picture, and the page of ``attnbench report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attnbench.files.atomic import replace_file
from attnbench.kernels.registry import registry

from ..training.judge.arms import arms_of
from ..training.rows import TrainingRun
from .page.figures import bytes_of, loss_figure
from .page.render import page
from .page.results import Results

__all__ = ["PAGE", "PICTURE", "write_training_report"]

PICTURE, PAGE = "loss.png", "training.html"


def write_training_report(runs: Sequence[TrainingRun], folder: Path) -> None:
    """Write ``loss.png`` and ``training.html``.  Raises OutputError."""
    replace_file(folder / PICTURE, bytes_of(loss_figure(arms_of(runs)), "png"))
    replace_file(folder / PAGE, page(Results({}, list(runs)), registry()).encode())
