"""``attnbench train``: train a model with two kinds of attention and compare speed and learning."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import MisuseError
from ..text.printable import brief
from .output import Format, FormatOption, print_json, print_text

if TYPE_CHECKING:
    from ..harness.training.config import TrainConfig
    from ..harness.training.rows import TrainingRun

__all__ = ["train"]

# Repeated from the harness, because importing it would import torch.
LinearsName = Literal["bf16", "te-fp8", "float8-tensorwise", "float8-rowwise"]
PolicyName = Literal["bf16", "autocast", "fp32-and-bf16", "fsdp-mixed", "fp32"]
OptimiserName = Literal["adamw", "adamw-fp8", "sgd"]
ParallelName = Literal["none", "ddp", "fsdp2"]
BlockName = Literal["plain", "te"]


def train(
    model: Annotated[
        str, typer.Option(help="gpt, vit-huge, or hf:CONFIG with the name of a transformers config.")
    ] = "gpt",
    size: Annotated[
        str | None,
        typer.Option(help="gpt: tiny, small, medium, 1b, 3b, 8b; vit-huge: huge, tiny [default: the first of these]"),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            help="The candidate: auto, a backend, a kernel, a plan (fa3:fp8>fa4:bf16) or sdpa, torch's [default: auto]"
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Attention of the baseline, which is otherwise the same: bf16 (auto without FP8), sdpa, or any plan."
        ),
    ] = None,
    max_error: Annotated[
        float | None, typer.Option(help="Allow auto to choose FP8 plans with at most this error.")
    ] = None,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="Allow auto to choose FP8 plans within the default budget.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of each run.")] = 30,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Number of runs per side; a verdict needs three.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seqlen: Annotated[int | None, typer.Option(min=1, help="Tokens per sample [default: depends on size]")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples per step and rank.")] = 8,
    vocab: Annotated[int, typer.Option(min=0, help="Rows of gpt's embedding; 0 for the number that bytes need.")] = 0,
    linears: Annotated[LinearsName, typer.Option(help="Precision of the linear layers.")] = "bf16",
    compare_linears: Annotated[
        LinearsName | None, typer.Option(help="Precision of the baseline's linear layers [default: as --linears]")
    ] = None,
    block: Annotated[BlockName, typer.Option(help="te: use TransformerEngine's layer in vit-huge.")] = "plain",
    policy: Annotated[PolicyName, typer.Option(help="Types in which weights are stored and updated.")] = "autocast",
    optimiser: Annotated[
        OptimiserName | None, typer.Option(help="Optimiser [default: adamw; for vit-huge sgd]")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate [default: depends on size]")] = None,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="Steps until the highest learning rate [default: a tenth of --steps, at most 100]"),
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(min=0, help="Weight decay of matrices [default: 0.1; for sgd 0]")
    ] = None,
    grad_clip: Annotated[
        float | None,
        typer.Option(min=0, help="Norm to which gradients are clipped; 0 for none [default: 1; for sgd 0]"),
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations in the backward.")
    ] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the blocks.")] = False,
    parallel: Annotated[
        ParallelName, typer.Option(help="How to distribute the run over the processes of torchrun.")
    ] = "none",
    data: Annotated[
        str | None, typer.Option(help="stdlib (Python's own sources), a text file or a folder; vit-huge: images")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder for rows and plots [default: a new one, printed at the end]")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue in --out: finished runs are kept, others are resumed or added.")
    ] = False,
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0 for none.")] = 100,
    patience: Annotated[int, typer.Option(min=1, help="Number of consecutive steps that may be NaN or infinite.")] = 5,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Price of the whole machine per hour, for price-performance.")
    ] = None,
    show: Annotated[
        list[str] | None,
        typer.Option(help="Train nothing; report the runs in these folders side by side: FOLDER or FOLDER=PRICE."),
    ] = None,
    format: FormatOption = "table",
) -> None:
    """Train with two kinds of attention and compare throughput, attention's share and loss, with a verdict."""
    if show:
        _print([run for place in show for run in _shown(place)], format)
        return
    if price_per_hour is not None and not _possible(price_per_hour):
        raise MisuseError(f"--price-per-hour {price_per_hour}: expected a positive price")
    if resume and out is None:
        raise MisuseError("--resume needs --out, the folder of the runs to continue")

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
    settings = {
        "resume": resume,
        "price_per_hour": price_per_hour,
        "checkpoint_every": checkpoint_every,
        "patience": patience,
    }
    if not _train(candidate, baseline, seeds, folder, device, settings, format):
        raise typer.Exit(1)


def _baseline(candidate: TrainConfig, compare: str | None, linears: LinearsName | None) -> TrainConfig | None:
    if compare is None:
        if linears is not None:
            raise MisuseError("--compare-linears needs --compare, the attention of the baseline")
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
    settings: dict[str, Any],
    format: Format,
) -> bool:
    """Train both sides; returns whether any run finished or diverged.  ``settings`` are keywords of ``Session``."""
    from rich.console import Console

    from ..harness.training.report.plots import write_plots
    from ..harness.training.run.foreseen import check_beforehand
    from ..harness.training.run.parallel import join_ranks
    from ..harness.training.run.progress import show_training_progress
    from ..harness.training.run.session import Session, plan_runs
    from ..harness.training.run.trainable import build

    runs = plan_runs(candidate, baseline, seeds)
    with join_ranks(device) as ranks:
        for config in (candidate, *([baseline] if baseline is not None else [])):
            check_beforehand(config, ranks.device)
        session = Session(folder, ranks, **settings)
        with session, show_training_progress(Console(stderr=True), len(runs), silent=not ranks.first) as told:
            try:
                rows = session.run(runs, build, told)
            except KeyboardInterrupt:
                print(f"stopped; to continue, run the same command with --resume --out {folder}", file=sys.stderr)
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
        raise MisuseError(f"--show {brief(place)}: expected FOLDER or FOLDER=PRICE with a positive price")
    return [run.model_copy(update={"price_per_hour": asked}) for run in read_runs(Path(folder))]


def _possible(price: float) -> bool:
    """Whether a row can hold it."""
    from ..harness.training.rows import LARGEST_PRICE, LEAST_PRICE

    return LEAST_PRICE <= price <= LARGEST_PRICE


def _fresh_folder(parallel: ParallelName) -> Path:
    from ..files.user_folders import data_folder

    if parallel != "none":
        raise MisuseError("several processes need --out, the same folder for all of them")
    return data_folder() / "training" / f"{datetime.now(timezone.utc):%Y-%m-%dT%H-%M-%S.%f}"
