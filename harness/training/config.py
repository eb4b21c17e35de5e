"""The configuration of one training run: model, precision, data and seed; frozen, comparable and JSON-able."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from attnbench.errors import InputError, MisuseError
from attnbench.files.json_text import validation_fault
from attnbench.kernels.registry import registry
from attnbench.text.printable import brief

from ..measure.accuracy import LARGEST_ERROR
from .rows import LONGEST_SETTING, MOST_STEPS

__all__ = [
    "LARGEST_SEED",
    "OWN",
    "SDPA",
    "Block",
    "Linears",
    "Optimiser",
    "Packing",
    "Parallel",
    "Policy",
    "TrainConfig",
]

Linears = Literal["bf16", "te-fp8", "float8-tensorwise", "float8-rowwise"]
Policy = Literal["bf16", "autocast", "fp32-and-bf16", "fsdp-mixed", "fp32"]
Optimiser = Literal["adamw", "adamw-fp8", "sgd"]
Parallel = Literal["none", "ddp", "fsdp2"]
Block = Literal["plain", "te"]
Packing = Literal["none", "packed", "padded"]

SDPA, OWN = "sdpa", "own"  # the two attentions that attnbench does not choose
LARGEST_SEED = 2**63 - 1
_LARGEST = 2**31 - 1
_SIZES = {"gpt": ("tiny", "small", "medium", "1b", "3b", "8b"), "vit-huge": ("huge", "tiny")}
_IMAGE_TOKENS = {"huge": 197, "tiny": 17}
# AdamW's learning rates and the tokens of a step that they are for, by size, after the GPT-3 paper (arXiv 2005.14165,
# table 2.1).  Steps of fewer tokens take the rate times the root of their ratio (arXiv 2205.10287, the scaling rule of
# adaptive gradients).  tiny is for 30 steps of any, without a long warm-up.
_RATES = {
    "tiny": (3e-3, 1),
    "small": (6e-4, 500_000),
    "medium": (3e-4, 500_000),
    "1b": (2e-4, 1_000_000),
    "3b": (1.6e-4, 1_000_000),
    "8b": (1.2e-4, 2_000_000),
}
_OTHER_RATE = (3e-4, 500_000)
# Steps until the highest rate.  Adam's first updates move every entry of a matrix by the whole rate, mostly in one
# direction, which raises the loss of wide and deep models.  The least are 2 / (1 - beta2) steps (arXiv 1910.04209).
_LEAST_WARM_UP, _MOST_WARM_UP = 40, 100
_HF = "hf:"
_LATER = {"context_parallel": 1, "layers": 0, "offload": False}
_WHAT = "the settings of a training run"
_Text = Annotated[str, Field(max_length=LONGEST_SETTING)]  # pydantic takes no text that is not UTF-8
_Positive = Annotated[int, Field(ge=1, le=_LARGEST)]
_Count = Annotated[int, Field(ge=0, le=_LARGEST)]
_Rate = Annotated[float, Field(ge=0, le=LARGEST_ERROR, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class TrainConfig:
    """One run.  ``make`` fills in what depends on the model; here every field is set.

    ``model``          ``gpt``, ``vit-huge``, or ``hf:`` and a transformers config (folder, file or name)
    ``size``           gpt: tiny, small, medium, 1b, 3b, 8b; vit-huge: huge, tiny; hf: ``config``
    ``vocab``, ``layers``  rows of gpt's embedding and head, and its blocks; 0 for the size's own
    ``seqlen``         tokens per sample; for vit-huge the tokens of its images (197, tiny 17)
    ``batch``          samples per step and rank
    ``attention``      ``sdpa`` (torch's default), ``auto``, a backend, kernel or plan as in ``attention(backend=...)``;
                       ``own`` only with ``block="te"``
    ``max_error``, ``fp8``  open FP8 plans to ``auto``
    ``linears``        ``bf16`` is torch's Linear in the policy's dtype
    ``block``          ``te`` uses TransformerEngine's TransformerLayer, with its own attention, in vit-huge
    ``lr``, ``warmup`` (steps), ``weight_decay``, ``grad_clip`` (norm; 0 for none)
    ``data``           ``stdlib``, a text file or folder; ``images`` for vit-huge
    ``context_parallel``  ranks that share each sample of gpt, by attnbench's ring, for ``sdpa`` by torch's;
                       ``parallel`` goes on spreading weights over all ranks
    ``offload``        keeps in the host's memory what ``checkpointing`` keeps
    ``packing``        ``none``: samples are windows of the text; else they are documents, none longer than ``seqlen``,
                       with ``batch`` · ``seqlen`` tokens together: ``packed`` end to end, or ``padded`` to rows

    ``make``, ``replace`` and ``from_dict`` raise InputError on invalid fields, UnknownBackendError on an unknown
    attention.
    """

    model: _Text
    size: str
    seqlen: _Positive
    batch: _Positive
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)]
    lr: _Rate
    warmup: _Count
    optimiser: Optimiser
    data: _Text
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    vocab: _Count = 0
    layers: _Count = 0
    attention: str = SDPA
    max_error: Annotated[float, Field(gt=0, le=LARGEST_ERROR, allow_inf_nan=False)] | None = None
    fp8: bool = False
    linears: Linears = "bf16"
    block: Block = "plain"
    policy: Policy = "autocast"
    weight_decay: _Rate = 0.1
    grad_clip: _Rate = 1.0
    checkpointing: bool = False
    offload: bool = False
    compile: bool = False
    parallel: Parallel = "none"
    context_parallel: _Positive = 1
    packing: Packing = "none"

    @classmethod
    def make(
        cls,
        model: str = "gpt",
        *,
        size: str | None = None,
        seqlen: int | None = None,
        batch: int = 8,
        steps: int = 30,
        lr: float | None = None,
        warmup: int | None = None,
        optimiser: Optimiser | None = None,
        weight_decay: float | None = None,
        grad_clip: float | None = None,
        data: str | None = None,
        **others: Any,
    ) -> TrainConfig:
        """A config with the model's usual size, length, data and optimiser.

        For vit-huge they are its article's: SGD at a constant rate, without decay and clipping.  AdamW's rate is that
        of the size, for as few tokens as a step has on a rank, and is reached after a tenth of the steps, at most 100
        and, for all but the tiny models, at least 40.
        """
        images = model == "vit-huge"
        size = size or {"gpt": "tiny", "vit-huge": "huge"}.get(model, "config")
        if seqlen is None:
            seqlen = _IMAGE_TOKENS.get(size, 197) if images else 128 if size == "tiny" else 2048
        optimiser = optimiser or ("sgd" if images else "adamw")
        plain = optimiser == "sgd"
        if lr is None:
            lr = 1e-3 if plain else _rate(size, batch, seqlen)
        if warmup is None:
            least = 0 if size == "tiny" else _LEAST_WARM_UP
            warmup = min(max(steps // 10, least), _MOST_WARM_UP) if isinstance(steps, int) and not plain else 0
        usual = {
            "model": model,
            "size": size,
            "seqlen": seqlen,
            "batch": batch,
            "steps": steps,
            "lr": lr,
            "warmup": warmup,
            "optimiser": optimiser,
            "weight_decay": (0.0 if plain else 0.1) if weight_decay is None else weight_decay,
            "grad_clip": (0.0 if plain else 1.0) if grad_clip is None else grad_clip,
            "data": data or ("images" if images else "stdlib"),
        }
        return cls.from_dict(usual | others)

    def __post_init__(self) -> None:
        self._check_model()
        if self.block == "te" and self.model != "vit-huge":
            raise InputError("TransformerEngine's block is vit-huge's alone; linears=te-fp8 serves the other models")
        if (self.attention == OWN) != (self.block == "te"):
            raise InputError("attention=own goes with block=te, whose attention cannot be chosen, and with it alone")
        if self.block == "te" and self.linears not in ("bf16", "te-fp8"):
            raise InputError(f"TransformerEngine's block computes in bf16 or te-fp8, not {self.linears}")
        if self.attention not in (SDPA, OWN, "auto"):
            registry().check(self.attention)
        if self.attention in (SDPA, OWN) and (self.fp8 or self.max_error is not None):
            raise InputError(
                f"fp8 and max_error are for attnbench's choice, and attention={self.attention} leaves it none"
            )
        if self.packing == "packed" and self.attention == SDPA:
            raise InputError(
                "torch's SDPA does not know where packed documents begin; name attention=auto or a backend "
                "(sdpa-flash is torch's varlen_attn), or packing=padded"
            )
        if self.policy == "fsdp-mixed" and self.parallel != "fsdp2":
            raise InputError("policy=fsdp-mixed is a setting of FSDP: it needs parallel=fsdp2")
        if self.offload and (not self.checkpointing or self.compile or "te" in (self.block, self.linears[:2])):
            raise InputError("offload moves what torch's checkpointing keeps: without compile and TransformerEngine")
        if self.context_parallel > 1:
            self._check_shared()

    def _check_shared(self) -> None:
        ranks = self.context_parallel
        if self.model != "gpt":
            raise InputError(f"context_parallel shares the samples of gpt, not of {self.model}")
        if self.parallel == "none":
            raise InputError("context_parallel leaves weights to parallel: say ddp or fsdp2")
        if self.packing != "none":
            raise InputError(f"context_parallel shares windows of the text, not {self.packing} documents")
        if self.seqlen % (2 * ranks):
            raise InputError(f"{ranks} ranks share samples of a multiple of {2 * ranks} tokens, not {self.seqlen}")

    def _check_model(self) -> None:
        if self.model.startswith(_HF):
            if len(self.model) == len(_HF):
                raise InputError("hf: wants a folder, a config.json or a model's name behind it")
            _one_of("size of a transformers config", self.size, ("config",))
        else:
            _one_of("model", self.model, (*_SIZES, "hf:CONFIG"))
            _one_of(f"size of {self.model}", self.size, _SIZES[self.model])
        if self.model == "vit-huge":
            if self.seqlen != _IMAGE_TOKENS[self.size]:
                raise InputError(
                    f"images of vit-huge {self.size} make {_IMAGE_TOKENS[self.size]} tokens, not {self.seqlen}"
                )
            _one_of("data of vit-huge", self.data, ("images",))
            if self.packing != "none":
                raise InputError(f"packing={self.packing} is of texts, and vit-huge learns images of one size")
        elif self.data == "images":
            raise InputError(f"{self.model} learns text: data must be stdlib, a text file or a folder")
        if (self.vocab or self.layers) and self.model != "gpt":
            raise InputError(f"vocabulary and layers of {self.model} are its own; vocab and layers are gpt's")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainConfig:
        """The config of these fields, such as ``to_dict`` gives.

        Raises InputError on a missing, unknown or impossible one, UnknownBackendError on an unknown attention.
        """
        if not isinstance(data, Mapping):
            raise InputError(f"{_WHAT} are an object, not {type(data).__name__}")
        try:
            return cls(**data)
        except TypeError as error:  # a name that is no text
            raise InputError(f"{_WHAT}: {error}") from None
        except ValidationError as error:
            cause = error.errors(include_url=False)[0].get("ctx", {}).get("error")
            if isinstance(cause, MisuseError):
                raise cause from None
            raise InputError(validation_fault(error, _WHAT)) from None

    def to_dict(self) -> dict[str, Any]:
        """Every field, in plain JSON types; without the default of fields that older rows lack."""
        found = asdict(self)
        return {name: value for name, value in found.items() if name not in _LATER or value != _LATER[name]}

    def replace(self, **changes: Any) -> TrainConfig:
        """The config with some fields changed."""
        return self.from_dict(asdict(self) | changes)

    @property
    def places(self) -> int:
        """Tokens of a sample that one rank computes."""
        return self.seqlen // self.context_parallel

    @property
    def learns_text(self) -> bool:
        """Whether samples are tokens, not images."""
        return self.model != "vit-huge"


def _rate(size: str, batch: int, seqlen: int) -> float:
    """AdamW's rate for the size and steps of so many tokens; what is no number is refused later."""
    rate, tokens = _RATES.get(size, _OTHER_RATE)
    if not all(isinstance(each, int) and each > 0 for each in (batch, seqlen)):
        return rate
    return rate * min(1.0, math.sqrt(batch * seqlen / tokens))


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"{name} is one of {', '.join(known)}, not {brief(value)}")
