"""A few training steps of a tiny random Llama by PEFT, accelerate, Lightning and TRL: the same losses."""

import copy
from functools import partial

import pytest
import torch
import transformers
from tiny_models import DECODER, TOKENS, tokens

from attnbench.integrations.sdpa import replaced
from attnbench.integrations.transformers import register

LIBRARY = "training libraries"
STEPS = 3


def llama(attention):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**DECODER)
    return transformers.LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation=attention)


def losses_of(model, step):
    optimiser = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    found = []
    for seed in range(STEPS):
        x = tokens(length=24, seed=seed)
        optimiser.zero_grad()
        loss = model(input_ids=x, labels=x).loss
        step(loss)
        optimiser.step()
        found.append(loss.detach())
    return torch.stack(found)


def with_peft(model, **_):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    return losses_of(adapted, lambda loss: loss.backward())


def with_accelerate(model, **_):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    return losses_of(accelerator.prepare(model), accelerator.backward)


def with_checkpointing(model, reentrant=True, **_):
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return losses_of(model, lambda loss: loss.backward())


def with_lightning(model, **_):
    lightning = pytest.importorskip("pytorch_lightning")
    found = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            loss = self.model(input_ids=batch, labels=batch).loss
            found.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    batches = [tokens(length=24, seed=seed) for seed in range(STEPS)]
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))
    return torch.stack(found)


def with_trl(model, folder, **settings):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, TOKENS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    lengths = [24, 20, 24, 17, 24, 24] if not settings.get("equal") else [24] * 6
    rows = [{"input_ids": tokens(1, length, seed)[0].tolist()} for seed, length in enumerate(lengths)]
    free = settings.get("padding_free", False)
    arguments = trl.SFTConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, report_to=[], use_cpu=True, bf16=False,
        logging_steps=1, save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, learning_rate=1e-3,
        max_length=None if free else 24, packing=settings.get("packing", False), padding_free=free,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=fast
    )
    trainer.train()
    return torch.tensor([each["loss"] for each in trainer.state.log_history if "loss" in each])


WAYS = {
    "peft": with_peft,
    "accelerate": with_accelerate,
    "checkpointing": with_checkpointing,
    "checkpointing without re-entry": partial(with_checkpointing, reentrant=False),
    "lightning": with_lightning,
    "trl": with_trl,
    "trl, equal lengths": partial(with_trl, equal=True),
    "trl, packed": partial(with_trl, packing=True),
    "trl, padding free": partial(with_trl, padding_free=True),
}


@pytest.mark.parametrize("name", WAYS)
def test_losses_are_those_of_sdpa(name, verdicts, tmp_path):
    way = WAYS[name]
    wanted = way(llama("sdpa"), folder=tmp_path)
    least = 1e-2 if name == "accelerate" else 1e-4

    def by_name(otherwise):
        calls = register(backend="reference", otherwise=otherwise)
        return way(llama("attnbench"), folder=tmp_path), calls

    def by_block(otherwise):
        with replaced("reference", otherwise=otherwise) as calls:
            return way(llama("sdpa"), folder=tmp_path), calls

    verdicts.judge(
        f"{name}, by name", wanted, lambda: by_name("raise"), handing_on=lambda: by_name("sdpa"), least=least
    )
    verdicts.judge(
        f"{name}, replaced", wanted, lambda: by_block("raise"), handing_on=lambda: by_block("torch"), least=least
    )
