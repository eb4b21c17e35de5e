"""``attnbench train``: train a model with two kinds of attention and compare speed and learning."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import MisuseError
from ..text.printable import brief
from .output import DeviceOption, Format, FormatOption, fresh_folder, print_json, print_text

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
PackingName = Literal["none", "packed", "padded"]

ModelOption = Annotated[
    str, typer.Option("--model", help="gpt, vit-huge, or hf:CONFIG with the name of a transformers config.")
]
SizeOption = Annotated[
    str | None,
    typer.Option(
        "--size", help="gpt: tiny, small, medium, 1b, 3b, 8b; vit-huge: huge, tiny [default: the first of these]"
    ),
]
AttentionOption = Annotated[
    str | None,
    typer.Option(
        "--attention",
        help="The candidate: auto, a backend, a kernel, a plan (fa3:fp8>fa4:bf16) or sdpa, torch's [default: auto]",
    ),
]
CompareOption = Annotated[
    str | None,
    typer.Option(
        "--compare",
        help="Attention of the baseline, which is otherwise the same: bf16 (auto without FP8), sdpa, or any plan.",
    ),
]
MaxErrorOption = Annotated[
    float | None, typer.Option("--max-error", help="Allow auto to choose FP8 plans with at most this error.")
]
Fp8Option = Annotated[bool, typer.Option("--fp8", help="Allow auto to choose FP8 plans within the default budget.")]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Optimiser steps of each run.")]
SeedsOption = Annotated[
    int, typer.Option("--seeds", min=1, max=100, help="Number of runs per side; a verdict needs three.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="The first seed.")]
SeqlenOption = Annotated[
    int | None, typer.Option("--seqlen", min=1, help="Tokens per sample [default: depends on size]")
]
BatchOption = Annotated[int, typer.Option("--batch", min=1, help="Samples per step and rank.")]
VocabOption = Annotated[
    int, typer.Option("--vocab", min=0, help="Rows of gpt's embedding; 0 for the number that bytes need.")
]
LayersOption = Annotated[
    int, typer.Option("--layers", min=0, help="Blocks of gpt, fewer to make a step short; 0 for the size's own.")
]
LinearsOption = Annotated[LinearsName, typer.Option("--linears", help="Precision of the linear layers.")]
CompareLinearsOption = Annotated[
    LinearsName | None,
    typer.Option("--compare-linears", help="Precision of the baseline's linear layers [default: as --linears]"),
]
BlockOption = Annotated[BlockName, typer.Option("--block", help="te: use TransformerEngine's layer in vit-huge.")]
PolicyOption = Annotated[PolicyName, typer.Option("--policy", help="Types in which weights are stored and updated.")]
OptimiserOption = Annotated[
    OptimiserName | None, typer.Option("--optimiser", help="Optimiser [default: adamw; for vit-huge sgd]")
]
LrOption = Annotated[
    float | None, typer.Option("--lr", help="Highest learning rate [default: depends on size and tokens of a step]")
]
WarmupOption = Annotated[
    int | None,
    typer.Option(
        "--warmup",
        min=0,
        help="Steps until the highest learning rate [default: a tenth of --steps, 40 to 100; for sgd 0]",
    ),
]
WeightDecayOption = Annotated[
    float | None, typer.Option("--weight-decay", min=0, help="Weight decay of matrices [default: 0.1; for sgd 0]")
]
GradClipOption = Annotated[
    float | None,
    typer.Option("--grad-clip", min=0, help="Norm to which gradients are clipped; 0 for none [default: 1; for sgd 0]"),
]
CheckpointingOption = Annotated[bool, typer.Option("--checkpointing", help="Recompute activations in the backward.")]
OffloadOption = Annotated[bool, typer.Option("--offload", help="Keep what --checkpointing keeps in the host's memory.")]
CompileOption = Annotated[bool, typer.Option("--compile", help="Compile the blocks.")]
ParallelOption = Annotated[
    ParallelName, typer.Option("--parallel", help="How to distribute the run over the processes of torchrun.")
]
ContextParallelOption = Annotated[
    int, typer.Option("--context-parallel", min=1, help="Ranks that share each sample of gpt, beside --parallel.")
]
PackingOption = Annotated[
    PackingName,
    typer.Option(
        "--packing",
        help="Learn whole documents, packed end to end or padded to rows; none: windows of the text. A step has "
        "batch · seqlen tokens without padding, a document at most seqlen.",
    ),
]
ComparePackingOption = Annotated[
    PackingName | None,
    typer.Option("--compare-packing", help="Packing of the same documents for the baseline [default: as --packing]"),
]
DataOption = Annotated[
    str | None, typer.Option("--data", help="stdlib (Python's own sources), a text file or a folder; vit-huge: images")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Folder for rows and plots [default: a new one, printed at the end]")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue in --out: finished runs are kept, others are resumed or added.")
]
CheckpointEveryOption = Annotated[
    int, typer.Option("--checkpoint-every", min=0, help="Steps between checkpoints; 0 for none.")
]
PatienceOption = Annotated[
    int, typer.Option("--patience", min=1, help="Number of consecutive steps that may be NaN or infinite.")
]
PricePerHourOption = Annotated[
    float | None, typer.Option("--price-per-hour", help="Price of the whole machine per hour, for price-performance.")
]
ShowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--show", help="Train nothing; report the runs in these folders side by side: FOLDER or FOLDER=PRICE."
    ),
]


def train(
    model: ModelOption = "gpt",
    size: SizeOption = None,
    attention: AttentionOption = None,
    compare: CompareOption = None,
    max_error: MaxErrorOption = None,
    fp8: Fp8Option = False,
    steps: StepsOption = 30,
    seeds: SeedsOption = 3,
    seed: SeedOption = 0,
    seqlen: SeqlenOption = None,
    batch: BatchOption = 8,
    vocab: VocabOption = 0,
    layers: LayersOption = 0,
    linears: LinearsOption = "bf16",
    compare_linears: CompareLinearsOption = None,
    block: BlockOption = "plain",
    policy: PolicyOption = "autocast",
    optimiser: OptimiserOption = None,
    lr: LrOption = None,
    warmup: WarmupOption = None,
    weight_decay: WeightDecayOption = None,
    grad_clip: GradClipOption = None,
    checkpointing: CheckpointingOption = False,
    offload: OffloadOption = False,
    compile: CompileOption = False,
    parallel: ParallelOption = "none",
    context_parallel: ContextParallelOption = 1,
    packing: PackingOption = "none",
    compare_packing: ComparePackingOption = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    out: OutOption = None,
    resume: ResumeOption = False,
    checkpoint_every: CheckpointEveryOption = 100,
    patience: PatienceOption = 5,
    price_per_hour: PricePerHourOption = None,
    show: ShowOption = None,
    format: FormatOption = "table",
) -> None:
    """Train with two kinds of attention and compare throughput, attention's share and loss, with a verdict."""
    if show:
        _print([run for place in show for run in _earlier_runs(place)], format)
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
        layers=layers,
        attention=attention if attention is not None else "own" if block == "te" else "auto",
        max_error=max_error,
        fp8=fp8,
        linears=linears,
        block=block,
        policy=policy,
        weight_decay=weight_decay,
        grad_clip=grad_clip,
        checkpointing=checkpointing,
        offload=offload,
        compile=compile,
        parallel=parallel,
        context_parallel=context_parallel,
        packing=packing,
    )
    baseline = _baseline(candidate, compare, compare_linears, compare_packing)
    if out is None and parallel != "none":
        raise MisuseError("several processes need --out, the same folder for all of them")
    folder = out or fresh_folder("training")
    settings = {
        "resume": resume,
        "price_per_hour": price_per_hour,
        "checkpoint_every": checkpoint_every,
        "patience": patience,
    }
    if not _train(candidate, baseline, seeds, folder, device, settings, format):
        raise typer.Exit(1)


def _baseline(
    candidate: TrainConfig, compare: str | None, linears: LinearsName | None, packing: PackingName | None
) -> TrainConfig | None:
    if compare is None:
        for name, value in {"linears": linears, "packing": packing}.items():
            if value is not None:
                raise MisuseError(f"--compare-{name} needs --compare, the attention of the baseline")
        return None
    if packing is not None and (packing == "none") != (candidate.packing == "none"):
        raise MisuseError(
            f"--compare-packing {packing} learns other data than --packing {candidate.packing}; packed and padded "
            "documents can be compared"
        )
    return candidate.replace(
        attention="auto" if compare == "bf16" else compare,
        fp8=False,
        max_error=None,
        block="plain",
        linears=linears or candidate.linears,
        packing=packing or candidate.packing,
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

    from ..harness.report.training import write_training_report
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
        with session, show_training_progress(Console(stderr=True), len(runs), silent=not ranks.first) as progress:
            try:
                rows = session.run(runs, build, progress)
            except KeyboardInterrupt:
                print(f"stopped; to continue, run the same command with --resume --out {folder}", file=sys.stderr)
                raise
            if ranks.first:
                _print(list(session.rows.values()), format)
                write_training_report(list(session.rows.values()), folder)
                print(f"rows, loss.png and training.html are in {folder}", file=sys.stderr)
    return any(row.status in ("ok", "diverged") for row in rows) or not ranks.first


def _print(runs: Sequence[TrainingRun], format: Format) -> None:
    from ..harness.training.report.summary import report

    if format == "json":
        print_json([run.to_dict() for run in runs])
    else:
        print_text(report(runs, "markdown" if format == "markdown" else "text"))


def _earlier_runs(place: str) -> list[TrainingRun]:
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
