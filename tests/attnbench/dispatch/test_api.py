"""attention(), explain() and use_backend through the public API."""

import inspect
import weakref
from contextlib import nullcontext

import pytest
import torch
from dense import dense_attention, relative_l2
from fakes import FakeBackward, FakeForward
from problems import tensors
from torch import Tensor

from attnbench import AttentionSpec, attention, explain, use_backend
from attnbench.dispatch.question import Question
from attnbench.errors import InputError, UnknownBackendError
from attnbench.kernels.contract import Inputs, Operands
from attnbench.kernels.execution import Execution
from attnbench.problem.fp8 import Recipe, quantise


def spec(q, k, v, **more) -> AttentionSpec:
    return AttentionSpec.make(
        batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], seqlen_q=q.shape[2], seqlen_kv=k.shape[2],
        head_dim=q.shape[3], head_dim_v=v.shape[3], **more,
    )  # fmt: skip


def test_bshd_is_a_view_of_the_same_answer():
    q, k, v = tensors()
    seen: list[Tensor] = []
    swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function in (Tensor.contiguous, Tensor.clone):
                seen.append(out)
            return out

    with Watch():
        out = attention(*swapped, layout="bshd", is_causal=True)
    assert not seen
    assert torch.equal(out.transpose(1, 2), attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("training", [True, False])
def test_operands_that_only_the_forward_reads_are_freed_before_the_backward(training):
    """Transposed copies are as large as the saved tensors, and a model keeps every layer's until its backward."""
    made = []

    class Copying(FakeForward):
        def prepare(self, inputs, spec):
            q, k, v = inputs.unquantised()
            made.append(torch.zeros(3))
            return Operands(spec, q, k, v, native=made[-1])

    q, k, v = tensors(dtype=torch.float32)
    execution = Execution(
        spec(q, k, v, direction="training" if training else "forward"),
        Copying("copying:fp32"),
        FakeBackward("fake:fp32") if training else None,
    )
    out, _ = execution(Inputs(q.requires_grad_(), k, v))
    assert out.requires_grad == training
    held = weakref.ref(made.pop())
    assert held() is None
    if training:
        out.sum().backward()
        assert q.grad is not None


@pytest.mark.parametrize("backend", ["auto", "reference:fp32>reference:fp32", "emulated:fp8-tensor>reference:fp32"])
@pytest.mark.parametrize("aside", [nullcontext, torch.autograd.graph.save_on_cpu])
def test_a_second_derivative_is_an_error_and_not_treated_as_constant(backend, aside):
    q, k, v = tensors(dtype=torch.float32)
    weight = torch.tensor(1.5, requires_grad=True)

    def first():
        with aside():
            out = attention(weight * q, k, weight * v, backend=backend)
        return out, *torch.autograd.grad(out.sum(), weight, create_graph=True)

    out, gradient = first()
    torch.autograd.grad(out.sum() + gradient.item(), weight)  # differentiating only the output works
    out, gradient = first()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum() + gradient.square(), weight)
    out = attention(q, k.clone().requires_grad_(), v, backend=backend)
    (gradient,) = torch.autograd.grad((weight * out).sum(), out, create_graph=True)
    assert torch.autograd.grad(gradient.sum(), weight)[0] == out.numel()  # the attention is no part of that one


@pytest.mark.parametrize("granularity", ["tensor", "head", "block", "token"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_quantised_tensors_are_used_with_their_scales(granularity, layout):
    q, k, v = tensors(sq=150, skv=200, dtype=torch.float32)
    parts = [quantise(x * (1 + 3 * torch.rand(1)), Recipe(granularity)) for x in (q, k, v)]
    truth, _ = dense_attention(*[x.dequantised(torch.float64) for x in parts], spec(q, k, v))
    descales = []
    for part in parts:
        batch, heads, *_ = part.data.shape
        scale = part.descale[..., 0]
        scale = {
            "tensor": scale.reshape(()) if granularity == "tensor" else None,
            "head": scale.reshape(batch, heads) if granularity == "head" else None,
            "block": scale[:, :, ::128] if granularity == "block" else None,
            "token": scale,
        }[granularity]
        descales.append(scale)
    data = [x.data if layout == "bhsd" else x.data.transpose(1, 2).contiguous() for x in parts]
    names = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    out = attention(*data, layout=layout, backend="reference:fp64", **names)
    assert out.dtype == torch.bfloat16
    out = out if layout == "bhsd" else out.transpose(1, 2)
    assert relative_l2(out, truth) < 0.004
    emulated = attention(*data, layout=layout, backend=f"emulated:fp8-{granularity}".replace("-head", ""), **names)
    assert relative_l2(emulated if layout == "bhsd" else emulated.transpose(1, 2), truth) < 0.07


def test_a_scale_for_each_key_head_serves_its_group():
    q, k, v = tensors()
    (q8, k8, v8) = (quantise(x, Recipe("head")) for x in (q, k, v))
    shared = torch.tensor([[0.5, 2.0], [1.0, 3.0]])
    scales = {"k_descale": k8.descale.view(2, 2), "v_descale": v8.descale.view(2, 2)}
    per_kv = attention(q8.data, k8.data, v8.data, backend="reference:fp64", q_descale=shared, **scales)
    per_q = attention(
        q8.data, k8.data, v8.data, backend="reference:fp64", q_descale=shared.repeat_interleave(2, 1), **scales
    )
    assert torch.equal(per_kv, per_q)
    with pytest.raises(TypeError, match="declares no descales"):  # a third party's kernel that is given them
        Inputs(q8, k8, v8).unquantised()


def test_arguments_override_contexts_and_contexts_override_variables(monkeypatch):
    q, k, v = tensors()
    monkeypatch.setenv("ATTNBENCH_BACKEND", "reference:fp64")
    choice = explain(q, k, v)
    assert (str(choice.plan), choice.asked_by, choice.basis) == ("reference:fp64", "ATTNBENCH_BACKEND", "explicit")
    with use_backend("reference:fp32"):
        assert str(explain(q, k, v).plan) == "reference:fp32"
        assert str(explain(q, k, v, backend="sdpa-math").plan) == "sdpa-math:bf16"
        with use_backend(max_error=0.2):
            assert (str(explain(q, k, v).plan), explain(q, k, v).budget) == ("reference:fp32", 0.2)
            assert explain(q, k, v, max_error=0.3).budget == 0.3
    assert str(explain(q, k, v).plan) == "reference:fp64"
    monkeypatch.setenv("ATTNBENCH_BACKEND", "nonsense")
    with pytest.raises(UnknownBackendError, match="nonsense"):
        attention(q, k, v)


@pytest.mark.parametrize("wish", [{"backend": "nobody"}, {"backend": None}, {"dtype": "fp4"}, {"max_error": -1.0}])
def test_an_invalid_context_is_refused_when_it_opens(wish):
    with pytest.raises((InputError, UnknownBackendError)), use_backend(**wish):
        pytest.fail("the block must not run")


BAD = {
    "rank": (lambda q, k, v: attention(q[0], k, v), "4 dimensions"),
    "batch": (lambda q, k, v: attention(q[:1], k, v), "batch"),
    "heads": (lambda q, k, v: attention(q[:, :3], k, v), "multiple of kv_heads"),
    "key length": (lambda q, k, v: attention(q, k, v[:, :, :5]), "length"),
    "dtypes": (lambda q, k, v: attention(q.float(), k, v), "one dtype"),
    "nan scale": (lambda q, k, v: attention(q, k, v, scale=float("nan")), "scale"),
    "tensor scale": (lambda q, k, v: attention(q, k, v, scale=torch.tensor(0.1)), "scale"),
    "softcap": (lambda q, k, v: attention(q, k, v, softcap=-2.0), "softcap"),
    "window": (lambda q, k, v: attention(q, k, v, window=(-1, 0)), "window"),
    "window list": (lambda q, k, v: attention(q, k, v, window=[3, 2]), "window"),
    "alignment": (lambda q, k, v: attention(q, k, v, is_causal=True, causal_alignment="left"), "causal_alignment"),
    "layout": (lambda q, k, v: attention(q, k, v, layout="sbhd"), "layout"),
    "dtype": (lambda q, k, v: attention(q, k, v, dtype="fp4"), "dtype"),
    "budget": (lambda q, k, v: attention(q, k, v, max_error=0), "max_error"),
    "descale of bf16": (lambda q, k, v: attention(q, k, v, q_descale=torch.ones(1)), "float8"),
    "descale missing": (lambda q, k, v: attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v))), "q_descale"),
    "backend": (lambda q, k, v: attention(q, k, v, backend="sdpa-flas"), "did you mean sdpa-flash"),
    "plan": (lambda q, k, v: attention(q, k, v, backend="reference:fp64>"), "kernel name"),
    "backend type": (lambda q, k, v: attention(q, k, v, backend=3), "backend"),
    "causal word": (lambda q, k, v: attention(q, k, v, is_causal="no"), "is_causal"),
    "grouped": (lambda q, k, v: attention(q, k, v, enable_gqa=None), "enable_gqa"),
    "lse": (lambda q, k, v: explain(q, k, v, return_lse="no"), "return_lse"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_clear_error(case):
    call, words = BAD[case]
    with pytest.raises((InputError, UnknownBackendError), match=words) as caught:
        call(*tensors())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("descale", [torch.ones(3), torch.ones(2, 2, 9), torch.ones(2, 2, dtype=torch.int64)])
def test_descales_of_a_wrong_shape_or_type_are_refused(descale):
    parts = [quantise(x, Recipe("head")) for x in tensors()]
    good = {"q_descale": torch.ones(2, 4), "k_descale": torch.ones(2, 2), "v_descale": torch.ones(2, 2)}
    for name in good:
        with pytest.raises(InputError, match="descale"):
            attention(*(x.data for x in parts), backend="reference:fp64", **{**good, name: descale})


def test_explain_and_question_take_the_arguments_of_attention():
    ours, its = inspect.signature(explain), inspect.signature(attention)
    assert list(ours.parameters.values()) == list(its.parameters.values())
    assert list(its.parameters) == list(Question._fields)
    assert (ours.return_annotation, explain.__name__, explain.__module__) == ("Choice", "explain", attention.__module__)
    assert explain.__doc__.startswith("What ``attention`` would run")
    x = tensors()
    with pytest.raises(TypeError, match="causal"):
        explain(*x, causal=True)
    with pytest.raises(TypeError, match="positional"):
        explain(*x, True)
