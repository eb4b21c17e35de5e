"""Optimisers by name, fp32 copies of bf16 weights, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnbench.errors import InputError

from ..config import TrainConfig

__all__ = ["MasterWeights", "Optimising", "learning_rate", "make_optimiser", "set_rate"]

_BETAS = (0.9, 0.95)
_MOMENTUM = 0.9  # the article's
_LAST_RATE = 0.1  # of the highest, at the end of the cosine
_ADA = (8, 9)

_Groups = list[dict[str, Any]]


class Optimising(Protocol):
    """The part of an optimiser that a training loop needs."""

    @property
    def param_groups(self) -> _Groups:
        """Dictionaries with an ``lr`` each."""

    def step(self) -> object:
        """Update the weights from their gradients."""

    def zero_grad(self) -> None:
        """Drop the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save."""


def make_optimiser(config: TrainConfig, module: nn.Module) -> Optimising:
    """The config's optimiser over the module's parameters, made after they are sharded.

    Matrices decay, vectors (norms, biases) do not.  AdamW has betas 0.9 and 0.95, SGD a momentum of 0.9.  Raises
    InputError if torchao's FP8 optimiser is not available.
    """
    parameters: list[Tensor] = [each for each in module.parameters() if each.requires_grad]
    if config.policy == "fp32-and-bf16":
        return MasterWeights(parameters, lambda masters: _optimiser(config, masters))
    return _optimiser(config, parameters)


def _optimiser(config: TrainConfig, parameters: list[Tensor]) -> Optimising:
    groups: _Groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimiser == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=_MOMENTUM)
    if config.optimiser == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=_BETAS, fused=parameters[0].is_cuda)
    optimiser: Optimising = _fp8_adamw(parameters[0].device)(groups, lr=config.lr, betas=_BETAS)
    return optimiser


def _fp8_adamw(device: torch.device) -> Any:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _ADA:
        raise InputError(f"optimiser=adamw-fp8 needs a GPU of compute capability 8.9 or later, and this is {device}")
    try:
        return import_module("torchao.optim").AdamWFp8
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"optimiser=adamw-fp8 is torchao's, which cannot be imported ({error}): pip install 'torchao>=0.10'"
        ) from None


class MasterWeights:
    """An optimiser over fp32 copies of bf16 weights; after each step the copies are rounded to the weights."""

    def __init__(self, parameters: list[Tensor], make: Callable[[list[Tensor]], Optimising]) -> None:
        self._parameters = parameters
        self._masters: list[Tensor] = [each.detach().to(torch.float32, copy=True) for each in parameters]
        self._inner = make(self._masters)

    @property
    def param_groups(self) -> _Groups:
        """The inner optimiser's groups, with the learning rates."""
        return self._inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Update the copies with the gradients in fp32, and round them to the weights."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
        self._inner.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None
            parameter.data.copy_(master)

    def zero_grad(self) -> None:
        """Drop the weights' gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The copies and the inner optimiser's state."""
        return {"masters": self._masters, "inner": self._inner.state_dict()}


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step, counted from 0: a linear warm-up, then a cosine down to a tenth; SGD's stays."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.optimiser == "sgd":
        return config.lr
    done = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    return config.lr * (_LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * done)) / 2)


def set_rate(optimiser: Optimising, rate: float) -> None:
    """Give all parameters this learning rate."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's compiled step reads it from a tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
