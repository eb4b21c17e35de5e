"""``attnbench explain``: which plan ``attention`` would run for a shape on this machine, and why the others lost."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import InputError
from ..problem.mask import Alignment
from ..text.printable import brief
from .output import DeviceOption, print_json, print_text

__all__ = ["explain"]


Dtype = Literal["bf16", "fp16", "fp32", "fp64", "fp8"]


def explain(
    heads: Annotated[int, typer.Option("--heads", help="Query heads.")],
    seqlen: Annotated[int, typer.Option("--seqlen", help="Queries, and keys unless --seqlen-kv says otherwise.")],
    head_dim: Annotated[int, typer.Option("--head-dim", help="Head dimension of q and k.")],
    batch: Annotated[int, typer.Option("--batch")] = 1,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="Key heads; as many as heads if left out.")] = None,
    seqlen_kv: Annotated[int | None, typer.Option("--seqlen-kv", help="Keys; as many as queries if left out.")] = None,
    head_dim_v: Annotated[int | None, typer.Option("--head-dim-v", help="Head dimension of v and the output.")] = None,
    dtype: Annotated[
        Dtype, typer.Option("--dtype", help="Of the tensors; fp8 is bf16 tensors and FP8 plans.")
    ] = "bf16",
    causal: Annotated[bool, typer.Option("--causal", help="Each query sees the keys up to its own place.")] = False,
    window: Annotated[
        str | None,
        typer.Option("--window", metavar="LEFT,RIGHT", help="Keys seen on each side; inf for no limit on one."),
    ] = None,
    causal_alignment: Annotated[
        Alignment, typer.Option("--causal-alignment", help="Where query 0 stands when there are more keys, or fewer.")
    ] = "top-left",
    softcap: Annotated[float, typer.Option("--softcap", help="Scores s become c*tanh(s/c); 0 for none.")] = 0.0,
    scale: Annotated[float | None, typer.Option("--scale", help="Of q.k; 1/sqrt(head dim) if left out.")] = None,
    training: Annotated[bool, typer.Option("--training", help="With gradients: forward and backward plans.")] = False,
    max_error: Annotated[
        float | None,
        typer.Option("--max-error", help="Largest relative L2 error to accept; opens FP8 if it admits it."),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="auto, a backend, a kernel or a plan.")] = "auto",
    frozen: Annotated[
        Path | None, typer.Option("--frozen", help="By this file of frozen choices, not by the tables.")
    ] = None,
    device: DeviceOption = "auto",
    all_plans: Annotated[
        bool, typer.Option("--all", help="Show the plans that cannot run here too, and why; JSON always has them.")
    ] = False,
    format: Annotated[Literal["text", "json", "markdown"], typer.Option("--format", help="How to print.")] = "text",
) -> None:
    """Say which plan would run for a shape, and why.

    The same choice as attention() would make here, with every other plan that could run and why it lost.
    """
    from ..choosing.selector import choose
    from ..dispatch.context import check_budget, current
    from ..freezing.freeze import freeze
    from ..kernels import devices
    from ..problem.spec import AttentionSpec
    from ..problem.tensors import mask_of

    check_budget(max_error)
    spec = AttentionSpec.make(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen_q=seqlen,
        seqlen_kv=seqlen_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype="bf16" if dtype == "fp8" else dtype,
        scale=scale,
        softcap=softcap,
        mask=mask_of(causal, _sides(window), causal_alignment),
        direction="training" if training else "forward",
    )
    wish = current()
    asked, asked_by = (wish.backend, wish.asked_by) if backend == "auto" else (backend, "argument")
    with nullcontext() if frozen is None else freeze(frozen, missing="raise"):
        choice = choose(
            spec,
            devices.find(device),
            backend=asked,
            asked_by=asked_by,
            fp8=dtype == "fp8" or max_error is not None,
            max_error=max_error,
        )
    if format == "json":
        print_json(choice.to_dict())
    else:
        print_text(choice.to_markdown(all=all_plans) if format == "markdown" else choice.to_text(all=all_plans))


def _sides(window: str | None) -> tuple[int | None, int | None] | None:
    """LEFT,RIGHT as ``attention`` takes them.  Raises InputError where that is not what was written."""
    if window is None:
        return None
    try:
        left, right = (None if side.strip() == "inf" else int(side) for side in window.split(","))
    except ValueError:
        raise InputError(
            f"a window is LEFT,RIGHT, two numbers of keys or inf, such as 128,0; not {brief(window)}"
        ) from None
    return left, right
