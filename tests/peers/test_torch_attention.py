"""torch's own samples of scaled_dot_product_attention, and a grid of its arguments, with its function replaced."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from attnbench.integrations.sdpa import replaced

LIBRARY = "torch"
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Against torch's kernels, which round as well: two roundings of the output's type.
TOLERANCE = {torch.float32: 2.5e-5, torch.float64: 1e-11, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def opinfo_samples(dtype):
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (each for each in op_db if each.name == "nn.functional.scaled_dot_product_attention")
    torch.manual_seed(0)
    return [(each.input, each.args, each.kwargs) for each in info.sample_inputs("cpu", dtype, requires_grad=True)]


def grid(dtype):
    """Heads that share keys, fewer and more queries than keys, masks in each spelling, strides, scales."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype).requires_grad_()

    for lead, (seqlen_q, seqlen_kv), group, kind, scale in itertools.product(
        [(2,), ()], [(8, 8), (5, 9), (9, 5), (1, 8)], [1, 2],
        ["none", "causal", "full", "tril", "added", "window", "padding", "bias", "dropout"], [None, 0.3],
    ):  # fmt: skip
        q = tensor(*lead, 4, seqlen_q, 16)
        k, v = (tensor(*lead, seqlen_kv, 4 // group, 16).transpose(-2, -3) for _ in range(2))
        seen = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
        named = {"scale": scale, "enable_gqa": group > 1}
        if kind == "causal":
            named["is_causal"] = True
        elif kind == "dropout":
            named["dropout_p"] = 0.5
        elif kind != "none":
            if kind in ("tril", "added"):
                seen = seen.tril()
            elif kind == "window":
                seen = seen.tril(1).triu(-2)
            elif kind == "padding":
                seen[:, 1] = False
            named["attn_mask"] = seen
            if kind in ("added", "bias"):
                named["attn_mask"] = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
            if kind == "bias":
                named["attn_mask"] = named["attn_mask"] + 0.5 * torch.eye(seqlen_q, seqlen_kv, dtype=dtype)
        yield q, (k, v), named


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("samples", [opinfo_samples, grid])
def test_outputs_and_gradients_are_torchs(samples, dtype, verdicts):
    for number, (query, args, named) in enumerate(samples(dtype)):

        def compute(number=number, query=query, args=args, named=named):
            torch.manual_seed(number)
            inputs = [query, *args[:2]]
            out = F.scaled_dot_product_attention(query, *args, **named)
            gradients = torch.autograd.grad(out.float().square().sum(), inputs)
            return torch.cat([each.detach().double().flatten() for each in (out, *gradients)])

        def ours(otherwise, compute=compute):
            with replaced("reference" if dtype != torch.float64 else "reference:fp64", otherwise=otherwise) as calls:
                return compute(), calls

        verdicts.judge(
            f"{samples.__name__} {number} {dtype} {named}", compute(), lambda ours=ours: ours("raise"),
            handing_on=lambda ours=ours: ours("torch"), least=TOLERANCE[dtype] * 4,
        )  # fmt: skip
