"""Blocks: linears in other types, all of a block or a refusal; checkpointed and compiled without another gradient."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from small_training import gradients
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from attnbench.errors import InputError
from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.data.images import random_images
from attnbench.harness.training.models.blocks import checkpoint_blocks, compile_blocks
from attnbench.harness.training.models.linears import convert_linears, refusal
from attnbench.harness.training.models.vit import make_vit
from attnbench.harness.training.models.vit_sizes import VIT_SIZES
from attnbench.harness.training.models.vit_te import te_block
from attnbench.harness.training.run.trainable import Trainable, build

CONFIG = TrainConfig.make(seqlen=32, batch=2)


_NUMBERS = count()


class TeLinear(nn.Linear):
    """TransformerEngine's Linear as far as this project calls it: weights drawn anew, ``weight`` and ``bias``."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, params_dtype: torch.dtype, device: Any) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=params_dtype, device=device)
        self.label = f"linear {next(_NUMBERS)}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Like TransformerEngine's, it breaks a graph, and depends on what each linear has of its own."""
        if torch.compiler.is_compiling() and self.label:
            torch._dynamo.graph_break()
        return super().forward(x)


class TeLayer(nn.Module):
    """Its TransformerLayer, which notes what it was made with and counts its calls."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings, self.calls = settings, 0
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    record = SimpleNamespace(inside=False, recomputed=0)

    @contextmanager
    def autocast(*, enabled: bool) -> Iterator[None]:
        record.inside = enabled
        yield
        record.inside = False

    def checkpoint(function: Any, *args: Any, use_reentrant: bool) -> Any:
        assert not use_reentrant
        function.fsdp_wrapped = False  # as TransformerEngine does
        record.recomputed += 1
        return function(*args)

    module: Any = ModuleType("transformer_engine.pytorch")
    module.TransformerLayer = TeLayer
    module.Linear, module.autocast, module.checkpoint = TeLinear, autocast, checkpoint
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    monkeypatch.setattr("attnbench.harness.training.run.trainable.refusal", lambda *_: None)
    return record


def test_transformer_engine_takes_over_weights_and_names(te: SimpleNamespace) -> None:
    plain, fp8 = build(CONFIG, "cpu"), build(CONFIG.replace(linears="te-fp8"), "cpu")
    before, after = dict(plain.module.named_parameters()), dict(fp8.module.named_parameters())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    kinds = {name: type(each) for name, each in fp8.module.named_modules() if isinstance(each, nn.Linear)}
    assert len(kinds) == 2 * 7 + 1
    assert {name for name, kind in kinds.items() if not issubclass(kind, TeLinear)} == {"head"}
    seen: list[bool] = []
    fp8.blocks[1].register_forward_hook(lambda *_: seen.append(te.inside))
    torch.testing.assert_close(fp8.loss(fp8.batch(0)), plain.loss(plain.batch(0)))
    assert seen == [True]
    assert not te.inside


def test_its_own_function_checkpoints_its_blocks(te: SimpleNamespace) -> None:
    trainable = build(CONFIG.replace(linears="te-fp8", checkpointing=True), "cpu")
    trainable.loss(trainable.batch(0))
    assert te.recomputed == 2
    checkpoint_blocks(build(CONFIG, "cpu").blocks, te=False)
    assert te.recomputed == 2


@torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True)
def test_however_many_there_are_torch_compiles_a_block_a_few_times(te: SimpleNamespace) -> None:
    torch._dynamo.reset()
    plain, compiled = (build(CONFIG.replace(linears="te-fp8", layers=6, policy="fp32"), "cpu") for _ in range(2))
    compile_blocks(compiled.blocks, backend="eager", within=True)
    checkpoint_blocks(compiled.blocks, te=True)
    torch.testing.assert_close(gradients(compiled), gradients(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("block", "tokens", "message"),
    [
        (nn.Sequential(nn.Linear(32, 24)), 64, "32 × 24"),
        (nn.Sequential(nn.Linear(32, 32)), 40, "batch · seqlen is 40"),
        (nn.Sequential(nn.Linear(32, 32), nn.Conv2d(3, 3, 1)), 64, r"multiply by 1\.weight, no torch Linear's"),
    ],
)
def test_nothing_stays_in_bf16_without_a_word(block: nn.Module, tokens: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        convert_linears([block], "float8-rowwise", tokens)


@pytest.mark.parametrize("kind", ["te-fp8", "float8-tensorwise", "float8-rowwise"])
def test_a_device_without_fp8_is_refused(kind: Any) -> None:
    with pytest.raises(InputError, match=f"linears={kind} need a GPU of compute capability"):
        build(CONFIG.replace(linears=kind), "cpu")


@pytest.mark.parametrize(
    ("kind", "module", "command"),
    [
        ("te-fp8", "transformer_engine.pytorch", r"pip install .*transformer-engine\[pytorch\]"),
        ("float8-tensorwise", "torchao.float8", "pip install 'torchao"),
    ],
)
def test_a_missing_package_comes_with_its_command(
    monkeypatch: pytest.MonkeyPatch, kind: Any, module: str, command: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, module, None)
    reason = refusal(kind, torch.device("cuda:0"))
    assert module in reason
    assert re.search(command, reason)


@pytest.mark.parametrize("recipe", ["float8-tensorwise", "float8-rowwise"])
def test_torchao_takes_over_weights_and_names(recipe: Any) -> None:
    pytest.importorskip("torchao")
    plain, fp8 = (build(CONFIG.replace(policy="bf16"), "cpu") for _ in range(2))
    convert_linears(fp8.blocks, recipe, 64, emulate=True)
    before, after = dict(plain.module.named_parameters()), dict(fp8.module.named_parameters())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    kinds = {name: type(each).__name__ for name, each in fp8.module.named_modules() if isinstance(each, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind != "Float8Linear"} == {"head"}
    batch = plain.batch(0)
    one, other = plain.loss(batch), fp8.loss(batch)
    assert one != other
    assert other.item() == pytest.approx(one.item(), rel=0.01)
    one.backward()
    other.backward()
    mine, its = (each.module.blocks[0].feed.up.weight.grad.float() for each in (plain, fp8))
    assert 1e-3 < (mine - its).norm() / mine.norm() < 0.2


def test_the_articles_block_is_refused_without_a_gpu() -> None:
    pytest.importorskip("timm")
    with pytest.raises(InputError, match="block=te is TransformerEngine's, which needs a GPU"):
        build(TrainConfig.make("vit-huge", size="tiny", block="te", attention="own"), "cpu")


def test_the_articles_block_attends_without_a_mask_over_the_axes_of_timm(te: SimpleNamespace) -> None:
    pytest.importorskip("timm")
    vit = make_vit(VIT_SIZES["tiny"], torch.device("cpu"), 0, None, block_fn=te_block(torch.device("cuda")))
    images, labels = random_images(0, range(2), 32, 16, torch.device("cpu"))
    vit(images, labels).backward()
    for block in vit.blocks:
        assert isinstance(block, TeLayer)
        assert block.calls == 1
        assert block.settings == {
            "hidden_size": 128,
            "ffn_hidden_size": 512,
            "num_attention_heads": 2,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "self_attn_mask_type": "no_mask",
            "attn_input_format": "bshd",
        }


SHORT = TrainConfig.make(seqlen=48, batch=2, policy="fp32")


def test_a_config_decides_whether_blocks_are_compiled() -> None:
    for asked in (False, True):
        made = build(SHORT.replace(compile=asked, checkpointing=True), "cpu")
        assert all((block._compiled_call_impl is not None) == asked for block in made.blocks)


def kept(trainable: Trainable) -> int:
    """Bytes that autograd keeps for the backward."""
    sizes = {}

    def note(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        trainable.loss(trainable.batch(0))
    return sum(sizes.values())


@pytest.mark.parametrize("attention", ["sdpa", "emulated:fp8"])
def test_checkpointing_gives_the_same_gradients_and_keeps_less(attention: str) -> None:
    plain = build(SHORT.replace(attention=attention), "cpu")
    checkpointed = build(SHORT.replace(attention=attention, checkpointing=True), "cpu")
    after = gradients(checkpointed)
    torch.testing.assert_close(after, gradients(plain), rtol=1e-5, atol=1e-7)
    assert kept(checkpointed) < 0.6 * kept(plain)
    offloaded = build(SHORT.replace(attention=attention, checkpointing=True, offload=True), "cpu")
    torch.testing.assert_close(gradients(offloaded), after, rtol=0, atol=0)
    inputs = len(offloaded.blocks) * SHORT.batch * SHORT.seqlen * 128 * 4  # of the blocks, fp32, 128 wide
    assert kept(checkpointed) - kept(offloaded) >= inputs


@pytest.mark.parametrize("checkpointing", ["none", "torch's", "TransformerEngine's"])
def test_blocks_are_compiled_whole_and_once(monkeypatch: pytest.MonkeyPatch, checkpointing: str) -> None:
    """TransformerEngine's function switches the compiler off, as this one does."""
    te = SimpleNamespace(checkpoint=torch._disable_dynamo(checkpoint))
    monkeypatch.setattr("attnbench.harness.training.models.blocks.transformer_engine", lambda: te)
    attention, within = "reference" if checkpointing == "torch's" else "sdpa", checkpointing == "TransformerEngine's"
    plain, compiled = (build(SHORT.replace(attention=attention), "cpu") for _ in range(2))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    if checkpointing == "torch's":
        checkpoint_blocks(compiled.blocks, te=False)
    compile_blocks(compiled.blocks, backend=counter, within=within)  # type: ignore[arg-type]
    if within:
        checkpoint_blocks(compiled.blocks, te=True)
    torch.testing.assert_close(gradients(compiled), gradients(plain), rtol=1e-4, atol=1e-6)
    assert counter.frame_count == 1  # two blocks alike, no graph break
    assert checkpointing == "none" or kept(compiled) < 0.6 * kept(plain)
