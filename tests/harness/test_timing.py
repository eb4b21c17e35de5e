"""Samples are raw, in milliseconds, and bounded in number and time."""

import time

import torch

from attnbench.harness.timing import Timer

CPU = torch.device("cpu")


def timer(**limits):
    return Timer(CPU, **{"seconds": 0.02, "warmup_seconds": 0.0, "patience": 0.2, **limits})


def test_samples_are_milliseconds_of_the_call():
    samples = timer().samples(lambda: time.sleep(0.004))
    assert len(samples) >= 5
    assert all(sample >= 4 for sample in samples)
    assert min(samples) < 40


def test_short_calls_are_sampled_until_the_time_or_the_number_is_reached():
    assert len(timer(most=7, seconds=10.0).samples(lambda: None)) == 7
    assert len(timer(seconds=0.0).samples(lambda: None)) == 5


def test_patience_ends_with_fewer_samples():
    assert 1 <= len(timer(patience=0.05).samples(lambda: time.sleep(0.03))) < 5


def test_a_call_beyond_all_patience_runs_once():
    calls = []
    samples = timer(patience=0.01).samples(lambda: (calls.append(1), time.sleep(0.02)))
    assert len(calls) == len(samples) == 1


def test_the_call_is_warmed_up_before_it_is_sampled():
    calls = []
    samples = timer(warmup_seconds=0.02, most=5).samples(lambda: (calls.append(1), time.sleep(0.001)))
    assert len(calls) >= len(samples) + 5


def test_gradients_are_not_recorded_while_sampling():
    seen = []
    timer(most=1).samples(lambda: seen.append(torch.is_grad_enabled()))
    assert not any(seen)
