"""NVML is opened and closed in one place, and whatever it does not tell has a reason instead."""

import fake_nvml
import pytest
from fake_nvml import Board, NVMLError

from attnbench.tables.nvml import Nvml

ONE, TWO = "00000000-aaaa-bbbb-cccc-000000000001", "00000000-aaaa-bbbb-cccc-000000000002"


def refusing(*arguments: object) -> None:
    raise NVMLError("Insufficient Permissions")


def test_a_session_tells_and_ends(monkeypatch):
    fake = fake_nvml.install(monkeypatch, Board(f"GPU-{TWO}", name="an old one"), Board(f"GPU-{ONE}"))
    with Nvml() as nvml:
        assert fake.sessions == 1
        assert nvml.driver() == "580.159.04"
        assert nvml.names() == ["an old one", "NVIDIA H200"]
        gpu = nvml.gpu(ONE)
        assert gpu is not None
        assert (gpu.clock_mhz(), gpu.memory_mhz(), gpu.power_w(), gpu.temperature_c()) == (1980, 3201, 690.4, 61)
        assert (gpu.clock_reasons(), gpu.highest_clock_mhz(), gpu.power_cap_w()) == (0, 1980, 700)
        assert gpu.silences == {}
        assert nvml.reason is None
    nvml.close()
    assert fake.sessions == 0


@pytest.mark.parametrize("prefix", ["", "GPU-", "MIG-"])
def test_a_mig_instance_and_a_gpu_are_told_apart_by_their_prefix(monkeypatch, prefix):
    fake_nvml.install(monkeypatch, Board(f"MIG-{ONE}"))
    with Nvml() as nvml:
        assert (nvml.gpu(prefix + ONE) is None) == (prefix == "GPU-")
        said = "NVML finds no GPU of this device's UUID: Not Found"  # which does not disclose it
        assert nvml.reason == (said if prefix == "GPU-" else None)


@pytest.mark.parametrize("query", ["nvmlSystemGetDriverVersion", "nvmlDeviceGetName", "nvmlShutdown"])
def test_a_query_that_is_refused_is_a_reason(monkeypatch, query):
    fake_nvml.install(monkeypatch, Board(f"GPU-{ONE}"))
    monkeypatch.setattr(f"pynvml.{query}", refusing)
    with Nvml() as nvml:
        assert (nvml.driver() is None) == (query == "nvmlSystemGetDriverVersion")
        assert (nvml.names() == []) == (query == "nvmlDeviceGetName")
    assert "Insufficient Permissions" in (nvml.reason or "")


def test_a_fact_that_nvml_has_no_value_for_is_a_silence_and_no_number(monkeypatch):
    fake_nvml.install(monkeypatch, Board(f"GPU-{ONE}", milliwatts=2**32 - 1, cap=2**32 - 1))
    with Nvml() as nvml:
        gpu = nvml.gpu(ONE)
        assert gpu is not None
        assert (gpu.power_w(), gpu.power_cap_w(), gpu.clock_mhz()) == (None, None, 1980)
        assert gpu.silences == dict.fromkeys(("power", "power cap"), "NVML calls it not available")
