"""What every test shares: a cache folder of its own, and examples and draws that are the same in every run."""

import gc
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("exhaustive", settings.get_profile("ci"), max_examples=200)
settings.register_profile("explore", settings.get_profile("ci"), max_examples=100, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """What was imported and collected lives to the end: no later collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws does not hang on which tests its process ran before."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the tables and results of the person who runs it."""
    home = tmp_path_factory.mktemp("home")
    for variable in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(home / variable.lower()))
    for variable in ("ATTNBENCH_BACKEND", "ATTNBENCH_TABLES"):
        monkeypatch.delenv(variable, raising=False)
    return home
