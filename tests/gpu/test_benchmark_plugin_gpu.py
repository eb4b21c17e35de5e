"""The pytest plug-in on a real GPU: what pytest-benchmark is handed is device time with a cold L2."""

import json
import statistics
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnbench.harness.measure.timing import Timer
from attnbench.tables.environment import Environment

SMALL, LARGE = (1, 8, 512, 64), (2, 16, 4096, 128)  # batch, heads, sequence, head dimension
MEASURING = """
import pytest
from attnbench import AttentionSpec

def spec(batch, heads, seqlen, head_dim, **more):
    return AttentionSpec.make(batch=batch, heads=heads, seqlen_q=seqlen, head_dim=head_dim, **more)

@pytest.mark.parametrize("shape", [{small}, {large}], ids=["small", "large"])
def test_kernel(attention_benchmark, shape):
    row = attention_benchmark("sdpa-flash:bf16", spec(*shape), cost="kernel")
    assert row.environment.device_type == "cuda"

def test_training(attention_benchmark):
    attention_benchmark("sdpa-flash:bf16>sdpa-flash:bf16", spec(*{small}, direction="training"), cost="backward")

def test_on_the_cpu(attention_benchmark):
    attention_benchmark("sdpa-flash:bf16", spec(1, 2, 128, 64), device="cpu")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What a session of pytest's own saves."""
    folder = tmp_path_factory.mktemp("session")
    (folder / "test_it.py").write_text(MEASURING.format(small=SMALL, large=LARGE))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", folder, "--benchmark-only"]
    done = subprocess.run(
        [*command, "--benchmark-json=out.json"], cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def benchmarks(saved: dict) -> dict:
    return {each["name"]: each for each in saved["benchmarks"]}


def seconds(shape: tuple[int, ...]) -> float:
    """The median of torch's own flash attention by the harness's timer, in this process."""
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    timer = Timer.for_device(torch.device("cuda", torch.cuda.current_device()))

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v)

    timer.take(call)  # a first visit finds clocks that were idle
    return statistics.median(timer.take(call).device_ms) / 1e3


def test_the_time_of_a_kernel_is_the_device_s(benchmarks: dict) -> None:
    """Where the device is slower than the host: what one process sees, another sees, too."""
    found = benchmarks["test_kernel[large]"]["stats"]["median"]
    assert 0.8 < found / seconds(LARGE) < 1.25


def test_the_host_is_not_in_the_time_of_a_short_kernel(benchmarks: dict) -> None:
    """Starting a kernel takes the host longer than this one runs."""
    short, long = (benchmarks[f"test_kernel[{name}]"]["stats"]["median"] for name in ("small", "large"))
    assert short < long / 10


def test_the_conditions_are_those_of_a_gpu(benchmarks: dict) -> None:
    evicted = f"{2 * torch.cuda.get_device_properties(0).L2_cache_size} bytes written before each sample"
    for name in ("test_kernel[small]", "test_kernel[large]", "test_training"):
        assert evicted in benchmarks[name]["options"]["timer"]
        assert benchmarks[name]["extra_info"]["device"] == "cuda:0"
    assert "perf_counter" in benchmarks["test_on_the_cpu"]["options"]["timer"]
    assert benchmarks["test_on_the_cpu"]["extra_info"]["device"] == "cpu"


def test_errors_and_gradients_are_judged(benchmarks: dict) -> None:
    assert benchmarks["test_training"]["extra_info"]["error"]["outlier"].keys() >= {"out", "dq", "dk", "dv"}
    for each in benchmarks.values():
        assert 0 < each["extra_info"]["error"]["normal"]["out"] < 0.01


def test_the_gpu_is_in_machine_info(saved: dict) -> None:
    found = saved["machine_info"]["attnbench"]
    assert found.keys() == {"cuda:0", "cpu"}
    gpu = Environment.from_dict(found["cuda:0"])
    assert (gpu.device_type, gpu.device_name) == ("cuda", torch.cuda.get_device_name(0))
    assert Environment.from_dict(found["cpu"]).device_type == "cpu"
