"""Environments say what must match, what is good to know, and refuse nonsense."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted import healthy

from attnbench.environment import Environment
from attnbench.errors import InputError

GPU = Environment(
    device_type="cuda", device_name="NVIDIA H200", device_count=8, capability="9.0", driver="580.159", cuda="13.0",
    cudnn="9.19.0", torch="2.11.0", triton="3.6.0", python="3.12.3", platform="Linux", cpu="a CPU", threads=16,
    attnbench="0.1.0", backends={"fa3": "0.4.2", "fa4": "4.0"},
)  # fmt: skip
CPU = replace(GPU, device_type="cpu", device_name="a CPU", device_count=1, capability=None, cuda=None, cudnn=None)


def test_this_machine_is_described_and_compares_equal_to_itself():
    here = Environment.detect(torch.device("cpu"), healthy())
    assert here.device_type == "cpu"
    assert here.device_name == here.cpu
    assert torch.__version__.startswith(here.torch)
    assert "+" not in here.torch
    assert here.threads == torch.get_num_threads()
    assert set(here.backends) == {"reference", "wide", "small", "picky"}
    again = Environment.from_dict(json.loads(json.dumps(here.to_dict())))
    assert again == here
    assert again.key == here.key
    assert hash(again) == hash(here)
    assert here.differences(again) == ([], [])


@pytest.mark.parametrize("name", ["device_name", "capability", "cuda", "cudnn", "torch", "triton"])
def test_what_binds_on_a_gpu(name):
    other = replace(GPU, **{name: "9.9"})
    assert other.key != GPU.key
    hard, soft = GPU.differences(other)
    assert hard == [f"{name} was {getattr(GPU, name)}, is 9.9"]
    assert soft == []


@pytest.mark.parametrize(
    ("name", "value"), [("driver", "1.0"), ("python", "3.13"), ("threads", 3), ("device_count", 1)]
)
def test_what_does_not_bind_on_a_gpu(name, value):
    other = replace(GPU, **{name: value})
    assert other.key == GPU.key
    assert GPU.differences(other) == ([], [f"{name} was {getattr(GPU, name)}, is {value}"])


def test_the_number_of_threads_binds_on_a_cpu():
    other = replace(CPU, threads=1)
    assert other.key != CPU.key
    assert CPU.differences(other)[0] == ["threads was 16, is 1"]


def test_another_version_of_a_backend_is_hard_and_another_backend_soft():
    other = replace(GPU, backends={"fa3": "0.5", "te": "2.0"})
    hard, soft = GPU.differences(other)
    assert hard == ["the backend fa3 was 0.4.2, is 0.5"]
    assert soft == ["the backend fa4 is no longer available", "the backend te was not available"]


@given(
    st.sampled_from(sorted(GPU.to_dict())),
    st.none() | st.integers() | st.lists(st.integers()) | st.text() | st.floats(),
)
def test_any_value_is_an_environment_or_an_input_error(name, value):
    data = {**GPU.to_dict(), name: value}
    try:
        found = Environment.from_dict(data)
    except InputError as error:
        said = str(error)
        assert name in said
    else:
        assert found.to_dict()[name] == value


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        None,
        {},
        {**GPU.to_dict(), "colour": "red"},
        {**GPU.to_dict(), "torch": None},
        {**GPU.to_dict(), "torch": ""},
        {**GPU.to_dict(), "driver": 580.1},
        {**GPU.to_dict(), "threads": 0},
        {**GPU.to_dict(), "threads": True},
        {**GPU.to_dict(), "cpu": "x" * 257},
        {**GPU.to_dict(), "backends": ["fa3"]},
        {**GPU.to_dict(), "backends": {"fa3": 3}},
        {**GPU.to_dict(), "backends": {str(number): "1" for number in range(257)}},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(InputError):
        Environment.from_dict(wrong)
