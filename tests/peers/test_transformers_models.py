"""Every model class of transformers that takes tokens or pixels, tiny and random, on inputs of several kinds."""

import copy
import inspect

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from attnbench.integrations.transformers import register

LIBRARY = "transformers"

_MAPPINGS = (
    auto.MODEL_MAPPING_NAMES,
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)
KINDS = sorted(
    {kind for names in _MAPPINGS for each in names.values() for kind in (each if isinstance(each, tuple) else (each,))}
)
VOCABULARY, LARGEST = 300, 20_000_000  # parameters
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "depth": 2,
    "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "intermediate_size": 48, "d_ff": 48, "d_inner": 48, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "projection_dim": 32, "image_size": 32, "patch_size": 8,
    "max_position_embeddings": 128, "n_positions": 128, "rotary_dim": 4, "embedding_size": 32,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 8, "hidden_act": "gelu",
}  # fmt: skip


def tiny(kind):
    """A configuration of this class with the sizes above, where it has them; parts are made tiny the same way."""
    default = kind()
    given = {name: value for name, value in SIZES.items() if getattr(default, name, None) is not None}
    for name, part in getattr(kind, "sub_configs", {}).items():
        own = getattr(default, name, None)
        if isinstance(own, transformers.PreTrainedConfig):
            given[name] = tiny(type(own)).to_dict()
        elif own is not None and part is not transformers.AutoConfig:
            given[name] = tiny(part).to_dict()
    config = kind(**given)
    for name in list(vars(config)):
        if "dropout" in name or name.endswith("_drop") or "drop_rate" in name:
            setattr(config, name, 0.0)
    return config


def inputs_of(model, config):
    """Inputs by name for each kind of batch that the model takes."""
    generator = torch.Generator().manual_seed(1)
    names = inspect.signature(model.forward).parameters
    if model.main_input_name == "pixel_values":
        size, channels = getattr(config, "image_size", 32), getattr(config, "num_channels", 3)
        size = size if isinstance(size, (tuple, list)) else (size, size)
        return {"pixels": {"pixel_values": torch.randn(2, channels, *size, generator=generator)}}
    if model.main_input_name != "input_ids":
        return {}
    tokens = torch.randint(3, VOCABULARY, (2, 20), generator=generator)
    plain = {"input_ids": tokens}
    if config.is_encoder_decoder:
        plain["decoder_input_ids"] = tokens
    found = {"plain": plain}
    if "attention_mask" in names:
        right, left = torch.ones(2, 20, dtype=torch.long), torch.ones(2, 20, dtype=torch.long)
        right[0, 15:], left[0, :5] = 0, 0
        found |= {
            "mask of ones": {**plain, "attention_mask": torch.ones(2, 20, dtype=torch.long)},
            "right padding": padded(plain, right),
        }
        if getattr(config, "classifier_pooling", None) != "cls":  # which would read the padding of the first place
            found["left padding"] = padded(plain, left)
    if "position_ids" in names and not config.is_encoder_decoder and "use_cache" in names:
        found["packed"] = {**plain, "position_ids": torch.arange(10).repeat(2, 2), "use_cache": False}
    return found


def padded(plain, real):
    """With the token for padding there: decoders classify by the last other one, whatever the mask says."""
    return {
        **plain,
        "input_ids": plain["input_ids"].masked_fill(real == 0, SIZES["pad_token_id"]),
        "attention_mask": real,
    }


def first_tensor(answer):
    """The first floating-point output, of whatever structure the answer is."""
    for each in answer.values() if hasattr(answer, "values") else answer:
        if isinstance(each, torch.Tensor) and each.is_floating_point():
            return each
    raise TypeError("no tensor in the answer")


def pair(kind, config, theirs):
    """The class with transformers' own attention, or None where it cannot be built here, and a maker of ours."""
    torch.manual_seed(0)
    model = kind._from_config(copy.deepcopy(config), attn_implementation=theirs, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # random weights attend to all keys alike: then a mask hardly matters
            if parameter.ndim == 2 and 16 < parameter.shape[0] < VOCABULARY:
                parameter *= 3
    return model


def answer_of(model, inputs):
    """Some models draw random numbers in every call: both sides draw the same ones."""
    torch.manual_seed(1)
    with torch.no_grad():
        return first_tensor(model(**inputs))


def of_ours(model, kind, config):
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="attnbench", dtype=torch.float32).eval()
    ours.load_state_dict(model.state_dict())
    return ours


@pytest.mark.parametrize("name", KINDS)
def test_outputs_are_those_of_transformers_own_attention(name, verdicts):
    try:
        kind = getattr(transformers, name, None)
        known = getattr(kind, "config_class", None) is not None
    except ImportError:  # a stand-in for a class whose libraries are absent
        known = False
    if not known:
        pytest.skip("no such class here")
    try:
        config = tiny(kind.config_class)
        if kind.can_generate() and not config.is_encoder_decoder and hasattr(config, "is_decoder"):
            config.is_decoder = True  # else what generates attends to what is to come
        with torch.device("meta"):
            size = sum(each.numel() for each in kind._from_config(copy.deepcopy(config)).parameters())
        assert size <= LARGEST
        theirs = "sdpa" if kind._supports_sdpa else "eager"
        model = pair(kind, config, theirs)
        batches = inputs_of(model, config)
        wanted = {case: answer_of(model, inputs) for case, inputs in batches.items()}
    except Exception as error:
        pytest.skip(f"not built: {type(error).__name__}: {str(error)[:100]}")
    if not wanted:
        pytest.skip("takes neither tokens nor pixels")

    def run(inputs, otherwise):
        calls = register(backend="reference", otherwise=otherwise)
        return answer_of(of_ours(model, kind, config), inputs), calls

    for case, inputs in batches.items():
        real = inputs.get("attention_mask")
        verdicts.judge(
            f"{name} {case}",
            *masked(wanted[case], real),
            lambda inputs=inputs, real=real: shown(run(inputs, "raise"), real),
            handing_on=lambda inputs=inputs, real=real: shown(run(inputs, "sdpa"), real),
        )
    if batches.keys() >= {"plain"} and kind.can_generate():
        generated(name, model, kind, config, verdicts)


def masked(out, real):
    """What a reader reads: nothing at padding."""
    return (out[real.bool()] if real is not None and out.shape[:2] == real.shape else out,)


def shown(found, real):
    return (*masked(found[0], real), found[1])


def generated(name, model, kind, config, verdicts):
    """Greedy decoding with a growing and with a static cache: the same tokens."""
    tokens = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for case, more in {"generate": {}, "generate, static": {"cache_implementation": "static"}}.items():
        try:
            wanted = model.generate(tokens, **options, **more)
        except Exception:
            continue

        def run(otherwise, more=more):
            calls = register(backend="reference", otherwise=otherwise)
            ours = of_ours(model, kind, config)
            return ours.generate(tokens, **options, **more).double(), calls

        verdicts.judge(
            f"{name} {case}", wanted.double(), lambda run=run: run("raise"), handing_on=lambda run=run: run("sdpa")
        )
