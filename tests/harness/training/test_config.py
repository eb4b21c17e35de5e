import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.errors import InputError, UnknownBackendError
from attnbench.harness.training.config import TrainConfig

CONFIGS = st.builds(
    TrainConfig.make,
    st.sampled_from(["gpt", "vit-huge", "hf:folder"]),
    steps=st.integers(1, 200_000),
    batch=st.integers(1, 4096),
    seed=st.integers(0, 2**63 - 1),
    attention=st.sampled_from(["sdpa", "auto", "reference", "emulated:fp8", "reference:fp32>reference:fp32"]),
    policy=st.sampled_from(["bf16", "autocast", "fp32-and-bf16", "fp32"]),
    linears=st.sampled_from(["bf16", "te-fp8", "float8-tensorwise", "float8-rowwise"]),
    checkpointing=st.booleans(),
    compile=st.booleans(),
    lr=st.none() | st.floats(0, 1),
)

SHARED = {"context_parallel": 2, "parallel": "fsdp2", "attention": "auto"}


@given(CONFIGS)
def test_a_config_survives_json(config: TrainConfig) -> None:
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert (
        not {"context_parallel", "layers", "offload"} & config.to_dict().keys()
    )  # what older releases began is resumed
    shared = TrainConfig.make(**SHARED, layers=1, checkpointing=True, offload=True)
    assert TrainConfig.from_dict(shared.to_dict()) == shared


def test_vit_huge_is_trained_as_its_article_does() -> None:
    config = TrainConfig.make("vit-huge")
    assert (config.optimiser, config.lr, config.weight_decay, config.grad_clip, config.warmup) == ("sgd", 1e-3, 0, 0, 0)
    assert (config.size, config.seqlen, config.data, config.policy) == ("huge", 197, "images", "autocast")
    gpt = TrainConfig.make(steps=500, lr=0.0)
    assert (gpt.optimiser, gpt.lr, gpt.weight_decay, gpt.grad_clip, gpt.warmup) == ("adamw", 0.0, 0.1, 1.0, 50)


@pytest.mark.parametrize(
    ("size", "seqlen", "batch", "steps", "lr", "warmup"),
    [
        ("3b", 10_000, 1, 5, 1.6e-5, 40),  # a hundredth of the published tokens: a tenth of the rate
        ("3b", 10_000, 400, 300, 1.6e-4, 40),
        ("8b", 20_000, 1, 5000, 1.2e-5, 100),
        ("tiny", 16, 1, 30, 3e-3, 3),
    ],
)
def test_the_default_rate_suits_the_size_and_the_tokens_of_a_step(
    size: str, seqlen: int, batch: int, steps: int, lr: float, warmup: int
) -> None:
    config = TrainConfig.make(size=size, seqlen=seqlen, batch=batch, steps=steps)
    assert (config.lr, config.warmup) == (pytest.approx(lr), warmup)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "bert"}, "model is one of gpt, vit-huge"),
        ({"model": "hf:"}, "behind it"),
        ({"size": "70b"}, "size of gpt is one of"),
        ({"model": "vit-huge", "seqlen": 512}, "197 tokens, not 512"),
        ({"model": "vit-huge", "data": "stdlib"}, "data of vit-huge is one of images"),
        ({"data": "images"}, "learns text"),
        ({"model": "vit-huge", "vocab": 512}, "vocabulary"),
        ({"model": "vit-huge", "layers": 2}, "layers are gpt's"),
        ({"offload": True}, "what torch's checkpointing keeps"),
        ({"offload": True, "checkpointing": True, "linears": "te-fp8"}, "without compile and TransformerEngine"),
        ({"layers": -1}, "layers: .* greater than or equal to 0"),
        ({"batch": True}, "batch: .* a valid integer"),
        ({"steps": 200_001}, "steps: .* less than or equal to 200000"),  # more than rows can hold
        ({"data": "d/" * 300}, "data: .* at most 500 characters"),
        ({"data": "b\udcffd.txt"}, "data: .* unicode"),
        ({"seed": 2**63}, "seed: .* less than"),
        ({"lr": float("nan")}, "lr: .* a finite number"),
        ({"max_error": -0.1, "attention": "auto"}, "max_error: .* greater than 0"),
        ({"policy": "fp16"}, "policy: .* 'bf16', 'autocast'"),
        ({"compile": 1}, "compile: .* a valid boolean"),
        ({"block": "te", "attention": "own"}, "vit-huge's alone"),
        ({"model": "vit-huge", "block": "te"}, "goes with block=te"),
        ({"attention": "own"}, "goes with block=te"),
        ({"model": "vit-huge", "block": "te", "attention": "own", "linears": "float8-rowwise"}, "bf16 or te-fp8"),
        ({"fp8": True}, "leaves it none"),
        ({"max_error": 0.1}, "leaves it none"),
        ({"packing": "packed", "attention": "sdpa"}, "SDPA does not know where packed documents begin"),
        ({"model": "vit-huge", "packing": "padded"}, "vit-huge learns images"),
        ({"packing": "tight"}, "packing: .* 'none', 'packed' or 'padded'"),
        ({"policy": "fsdp-mixed"}, "parallel=fsdp2"),
        (SHARED | {"context_parallel": 0}, "context_parallel: .* greater than or equal to 1"),
        (SHARED | {"model": "hf:folder"}, "shares the samples of gpt"),
        (SHARED | {"parallel": "none"}, "say ddp or fsdp2"),
        (SHARED | {"seqlen": 130}, "a multiple of 4 tokens, not 130"),
    ],
)
def test_an_invalid_config_is_reported(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainConfig.make(**wrong)  # type: ignore[arg-type]


def test_an_unknown_attention_is_reported_as_everywhere() -> None:
    for make in (TrainConfig.make, TrainConfig.make().replace):
        with pytest.raises(UnknownBackendError, match="no backend is named 'fa9'"):
            make(attention="fa9")


@pytest.mark.parametrize(
    "data", [[], {"model": "gpt"}, *(TrainConfig.make().to_dict() | {name: "red"} for name in ("colour", 7))]
)
def test_data_that_no_config_wrote_is_an_error(data: object) -> None:
    with pytest.raises(InputError):
        TrainConfig.from_dict(data)  # type: ignore[arg-type]
