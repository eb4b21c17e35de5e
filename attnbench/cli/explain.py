"""``attnbench explain``: which plan ``attention`` would run for a shape on this machine, and why the others lost."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import InputError
from ..problem.mask import Alignment
from ..text.printable import brief
from .output import DeviceOption, print_json, print_text

__all__ = ["explain"]


Dtype = Literal["bf16", "fp16", "fp32", "fp64", "fp8"]


def explain(
    heads: Annotated[int, typer.Option("--heads", help="Query heads.")],
    seqlen: Annotated[
        int, typer.Option("--seqlen", help="Number of queries; also of keys unless --seqlen-kv is given.")
    ],
    head_dim: Annotated[int, typer.Option("--head-dim", help="Head dimension of q and k.")],
    batch: Annotated[int, typer.Option("--batch", help="Batch size, or the number of sequences.")] = 1,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", help="Key and value heads [default: as many as query heads]")
    ] = None,
    seqlen_kv: Annotated[
        int | None, typer.Option("--seqlen-kv", help="Number of keys [default: as many as queries]")
    ] = None,
    head_dim_v: Annotated[
        int | None, typer.Option("--head-dim-v", help="Head dimension of v and of the output [default: --head-dim]")
    ] = None,
    packed: Annotated[
        int | None,
        typer.Option("--packed", help="Packed sequences, so many tokens in all; --seqlen is then the longest one."),
    ] = None,
    padded: Annotated[
        Literal["left", "right"] | None, typer.Option("--padded", help="Rows of --seqlen, padded on this side.")
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option("--dtype", help="Type of the tensors; fp8 means bf16 tensors with FP8 plans allowed.")
    ] = "bf16",
    causal: Annotated[bool, typer.Option("--causal", help="Each query sees the keys up to its own position.")] = False,
    window: Annotated[
        str | None,
        typer.Option("--window", metavar="LEFT,RIGHT", help="Number of keys visible on each side; inf for no limit."),
    ] = None,
    causal_alignment: Annotated[
        Alignment,
        typer.Option("--causal-alignment", help="How queries and keys are aligned when their numbers differ."),
    ] = "top-left",
    softcap: Annotated[float, typer.Option("--softcap", help="Cap c: scores s become c*tanh(s/c); 0 for none.")] = 0.0,
    scale: Annotated[
        float | None, typer.Option("--scale", help="Factor of the scores q.k [default: 1/sqrt(head dim)]")
    ] = None,
    training: Annotated[bool, typer.Option("--training", help="Choose a plan with a forward and a backward.")] = False,
    max_error: Annotated[
        float | None,
        typer.Option("--max-error", help="Largest relative L2 error to accept; allows FP8 plans within it."),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="auto, a backend, a kernel or a plan.")] = "auto",
    frozen: Annotated[
        Path | None, typer.Option("--frozen", help="Use this file of frozen choices instead of the tables.")
    ] = None,
    device: DeviceOption = "auto",
    all_plans: Annotated[
        bool,
        typer.Option("--all", help="Also show the plans that cannot run here, with reasons; JSON always has them."),
    ] = False,
    format: Annotated[Literal["text", "json", "markdown"], typer.Option("--format", help="Output format.")] = "text",
) -> None:
    """Show which plan attention() would run for a shape, and why.

    Makes the choice that attention() makes on this machine, and lists each other plan that could run with the reason
    why it lost.
    """
    from ..choosing.selector import choose
    from ..dispatch.context import check_budget, current
    from ..freezing.freeze import freeze
    from ..kernels import devices
    from ..problem.spec import AttentionSpec
    from ..problem.tensors import mask_of

    check_budget(max_error)
    spec = AttentionSpec.make(
        **_sizes(batch, seqlen, seqlen_kv, packed, padded),
        heads=heads,
        kv_heads=kv_heads,
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


def _sizes(
    batch: int, queries: int, keys: int | None, packed: int | None, padded: Literal["left", "right"] | None
) -> dict[str, Any]:
    """The sizes of the spec.  Raises InputError for sequences that are both, or cannot have so many tokens."""
    from ..problem.lengths_kind import LengthsKind, packed_sizes

    if packed is not None and (padded is not None or keys not in (None, queries)):
        raise InputError("--packed goes without --padded and --seqlen-kv")
    if packed is not None:
        if not queries <= packed <= batch * queries:
            message = f"--packed {packed}: expected {queries} to {batch * queries}, the tokens of {batch} sequences of"
            raise InputError(f"{message} which the longest has {queries}")
        return packed_sizes(batch, queries, queries, packed, packed, square=True)
    sizes = {"batch": batch, "seqlen_q": queries, "seqlen_kv": keys}
    if padded is None:
        return sizes
    kind = LengthsKind(batch="padded" if padded == "right" else "left-padded", square=keys in (None, queries))
    return {**sizes, "lengths": kind}


def _sides(window: str | None) -> tuple[int | None, int | None] | None:
    """LEFT,RIGHT as ``attention`` takes them.  Raises InputError for text of another form."""
    if window is None:
        return None
    try:
        left, right = (None if side.strip() == "inf" else int(side) for side in window.split(","))
    except ValueError:
        raise InputError(
            f"--window {brief(window)}: expected LEFT,RIGHT, two numbers of keys or inf, such as 128,0"
        ) from None
    return left, right
