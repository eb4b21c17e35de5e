"""``attnbench train``: train with one attention and with another, and say what it gains and whether it still learns."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import MisuseError
from ..text.printable import brief
from .output import Format, FormatOption, print_json, print_text

if TYPE_CHECKING:
    from ..harness.training.config import TrainConfig
    from ..harness.training.rows import TrainingRun

__all__ = ["train"]

# The harness has these lists, too, but asking it would cost an import of torch.
LinearsName = Literal["bf16", "te-fp8", "float8-tensorwise", "float8-rowwise"]
PolicyName = Literal["bf16", "autocast", "fp32-and-bf16", "fsdp-mixed", "fp32"]
OptimiserName = Literal["adamw", "adamw-fp8", "sgd"]
ParallelName = Literal["none", "ddp", "fsdp2"]
BlockName = Literal["plain", "te"]


def train(
    model: Annotated[str, typer.Option(help="gpt, vit-huge, or hf:CONFIG, a transformers config.")] = "gpt",
    size: Annotated[
        str | None, typer.Option(help="gpt: tiny, small, medium, 1b, 3b, 8b; vit-huge: huge, tiny [default: the first]")
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            help="auto, a backend, kernel or plan (fa3:fp8>fa4:bf16), or sdpa: torch's own choice [default: auto]"
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="The baseline's attention, else the same run: bf16 (auto without FP8), sdpa, or any plan."),
    ] = None,
    max_error: Annotated[float | None, typer.Option(help="Opens the FP8 plans of this error to auto.")] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="Opens FP8 plans within the default budget to auto.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of each run.")] = 30,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each kind; a verdict needs three.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="The first of the seeds.")] = 0,
    seqlen: Annotated[int | None, typer.Option(min=1, help="Tokens a sample [default: by size]")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples a step and rank.")] = 8,
    vocab: Annotated[int, typer.Option(min=0, help="Rows of gpt's embedding; 0 for what bytes need.")] = 0,
    linears: Annotated[LinearsName, typer.Option(help="What the linear layers compute in.")] = "bf16",
    compare_linears: Annotated[
        LinearsName | None, typer.Option(help="The same of the baseline [default: as --linears]")
    ] = None,
    block: Annotated[BlockName, typer.Option(help="te: TransformerEngine's layer in vit-huge.")] = "plain",
    policy: Annotated[PolicyName, typer.Option(help="In which types weights are kept and updated.")] = "autocast",
    optimiser: Annotated[OptimiserName | None, typer.Option(help="[default: adamw, of vit-huge sgd]")] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate [default: by size]")] = None,
    warmup: Annotated[int | None, typer.Option(min=0, help="Steps up to it [default: a tenth, at most 100]")] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0, help="Of matrices [default: 0.1, of sgd 0]")] = None,
    grad_clip: Annotated[
        float | None, typer.Option(min=0, help="Norm that gradients are cut to; 0 for none [default: 1, of sgd 0]")
    ] = None,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Recompute activations.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the blocks.")] = False,
    parallel: Annotated[ParallelName, typer.Option(help="Over what torchrun started.")] = "none",
    data: Annotated[
        str | None, typer.Option(help="stdlib (Python's own sources), a text file or folder [vit-huge: images]")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder for rows and plots [default: a fresh one, named at the end]")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in --out: runs that are there are kept, others resumed or added.")
    ] = False,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="Steps between checkpoints of the run's state; 0 for none.")
    ] = 100,
    patience: Annotated[int, typer.Option(min=1, help="Steps in a row that may be NaN or infinite.")] = 5,
    price_per_hour: Annotated[float | None, typer.Option(help="Of the whole machine, for price-performance.")] = None,
    show: Annotated[
        list[str] | None,
        typer.Option(help="Train nothing: report what is in these folders, side by side. FOLDER or FOLDER=PRICE."),
    ] = None,
    format: FormatOption = "table",
) -> None:
    """Train with one attention and with another: throughput, attention's share, loss curves, and a verdict."""
    if show:
        _print([run for place in show for run in _shown(place)], format)
        return
    if price_per_hour is not None and not _possible(price_per_hour):
        raise MisuseError(f"--price-per-hour is a positive price, not {price_per_hour}")
    if resume and out is None:
        raise MisuseError("--resume needs --out, the folder of the runs to go on with")

    from ..harness.training.config import TrainConfig

    candidate = TrainConfig.make(
        model,
        size=size,
        seqlen=seqlen,
        batch=batch,
        steps=steps,
        lr=lr,
        warmup=warmup,
        optimiser=optimiser,
        data=data,
        seed=seed,
        vocab=vocab,
        attention=attention if attention is not None else "own" if block == "te" else "auto",
        max_error=max_error,
        fp8=fp8,
        linears=linears,
        block=block,
        policy=policy,
        weight_decay=weight_decay,
        grad_clip=grad_clip,
        checkpointing=checkpointing,
        compile=compile,
        parallel=parallel,
    )
    baseline = _baseline(candidate, compare, compare_linears)
    folder = out or _fresh_folder(parallel)
    if not _train(
        candidate, baseline, seeds, folder, device, resume, checkpoint_every, patience, price_per_hour, format
    ):
        raise typer.Exit(1)


def _baseline(candidate: TrainConfig, compare: str | None, linears: LinearsName | None) -> TrainConfig | None:
    if compare is None:
        if linears is not None:
            raise MisuseError("--compare-linears needs --compare, the baseline's attention")
        return None
    return candidate.replace(
        attention="auto" if compare == "bf16" else compare,
        fp8=False,
        max_error=None,
        block="plain",
        linears=linears or candidate.linears,
    )


def _train(
    candidate: TrainConfig,
    baseline: TrainConfig | None,
    seeds: int,
    folder: Path,
    device: str,
    resume: bool,
    checkpoint_every: int,
    patience: int,
    price_per_hour: float | None,
    format: Format,
) -> bool:
    """Whether any run came to its end or to a finding."""
    from rich.console import Console

    from ..harness.training.report.plots import write_plots
    from ..harness.training.run.foreseen import check_beforehand
    from ..harness.training.run.parallel import joined
    from ..harness.training.run.progress import telling
    from ..harness.training.run.session import Session, planned
    from ..harness.training.run.trainable import build

    runs = planned(candidate, baseline, seeds)
    with joined(device) as ranks:
        for config in (candidate, *([baseline] if baseline is not None else [])):
            check_beforehand(config, ranks.device)
        session = Session(
            folder,
            ranks,
            resume=resume,
            price_per_hour=price_per_hour,
            checkpoint_every=checkpoint_every,
            patience=patience,
        )
        with session, telling(Console(stderr=True), len(runs), silent=not ranks.first) as told:
            try:
                rows = session.run(runs, build, told)
            except KeyboardInterrupt:
                print(f"stopped; the same command with --resume --out {folder} goes on", file=sys.stderr)
                raise
            if ranks.first:
                _print(list(session.rows.values()), format)
                write_plots(list(session.rows.values()), folder)
                print(f"rows and plots are in {folder}", file=sys.stderr)
    return any(row.status in ("ok", "diverged") for row in rows) or not ranks.first


def _print(runs: Sequence[TrainingRun], format: Format) -> None:
    from ..harness.training.report.summary import report

    if format == "json":
        print_json([run.to_dict() for run in runs])
    else:
        print_text(report(runs, "markdown" if format == "markdown" else "text"))


def _shown(place: str) -> list[TrainingRun]:
    """The runs of ``FOLDER`` or ``FOLDER=PRICE``; the price replaces what the rows say."""
    from ..harness.training.rows import read_runs

    folder, _, price = place.rpartition("=")
    if not folder or os.path.exists(place):  # Path.exists raises on a name that no file system takes
        return list(read_runs(Path(place)))
    try:
        asked = float(price)
    except ValueError:
        asked = math.nan
    if not _possible(asked):
        raise MisuseError(f"--show is FOLDER or FOLDER=PRICE with a positive price, not {brief(place)}")
    return [run.model_copy(update={"price_per_hour": asked}) for run in read_runs(Path(folder))]


def _possible(price: float) -> bool:
    """Whether a row can hold it."""
    from ..harness.training.rows import LARGEST_PRICE, LEAST_PRICE

    return LEAST_PRICE <= price <= LARGEST_PRICE


def _fresh_folder(parallel: ParallelName) -> Path:
    from ..files.user_folders import data_folder

    if parallel != "none":
        raise MisuseError("several processes need --out, one folder that all of them name")
    return data_folder() / "training" / f"{datetime.now(timezone.utc):%Y-%m-%dT%H-%M-%S.%f}"
