"""A file of captured tensors as inputs: what was written comes back bit by bit, and a file that lies is refused."""

import json
import shutil
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from attnbench.errors import InputError, MalformedFileError
from attnbench.harness.capture.file import (
    CapturedCall,
    CapturedIndex,
    captured_family,
    read_captured,
    tensor_shapes,
    write_captured,
)
from attnbench.harness.cases.inputs import draw
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

CPU = torch.device("cpu")
SPEC = AttentionSpec.make(
    batch=1, heads=4, kv_heads=2, seqlen_q=5, seqlen_kv=7, head_dim=8, head_dim_v=4, mask=Mask(right=0), dtype="fp32",
    direction="training",
)  # fmt: skip
KEY = "attnbench.captured"


def values(spec, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(TO_TORCH[spec.dtype])
        for name, shape in tensor_shapes(spec).items()
    }


def written(path, specs, tensors=None):
    calls = [CapturedCall(name=f"layers.{number}", number=number, spec=spec) for number, spec in enumerate(specs)]
    index = CapturedIndex(torch="2", seen=len(calls), unrecorded={}, calls=calls)
    tensors = tensors or [values(spec, number) for number, spec in enumerate(specs)]
    write_captured(path, index, tensors)
    return tensors


@pytest.fixture
def acts(tmp_path):
    written(tmp_path / "acts.safetensors", [SPEC, SPEC.replace(direction="forward"), SPEC.replace(mask=Mask(2, 0))])
    return tmp_path / "acts.safetensors"


@given(
    st.lists(
        st.builds(
            AttentionSpec.make,
            batch=st.integers(1, 2),
            heads=st.sampled_from((2, 4)),
            kv_heads=st.sampled_from((1, 2)),
            seqlen_q=st.integers(1, 6),
            seqlen_kv=st.integers(1, 6),
            head_dim=st.integers(1, 9),
            head_dim_v=st.integers(1, 9),
            dtype=st.sampled_from(("fp64", "fp32", "bf16", "fp16")),
            mask=st.sampled_from((Mask(), Mask(right=0), Mask(3, 1, "bottom-right"))),
            direction=st.sampled_from(("forward", "training")),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_written_is_read_bit_by_bit(tmp_path_factory, specs):
    path = tmp_path_factory.mktemp("round") / "trip.safetensors"
    tensors = written(path, specs)
    file = read_captured(path)
    assert [call.spec for call in file.calls] == specs
    for number, (spec, expected) in enumerate(zip(specs, tensors, strict=True)):
        inputs = draw(spec, file.family(number), CPU)
        assert inputs.drawn_on == "cpu"
        for name in ("q", "k", "v", "grad_out"):
            found = getattr(inputs, name)
            assert found is None if name not in expected else torch.equal(found, expected[name])


def test_two_files_of_one_name_are_two_families(tmp_path):
    for folder, seed in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder / "acts.safetensors", [SPEC], [values(SPEC, seed)])
    families = {captured_family("captured:acts.safetensors", SPEC, tmp_path / folder) for folder in "ab"}
    assert len(families) == 2
    shutil.copy(tmp_path / "a" / "acts.safetensors", tmp_path / "copy.safetensors")
    (tmp_path / "copy.safetensors").replace(tmp_path / "b" / "acts.safetensors")
    assert captured_family("captured:acts.safetensors", SPEC, tmp_path / "b") in families
    changed = next(family for family in families if family.path.parent.name == "b")
    with pytest.raises(InputError, match="no longer the file"):
        draw(SPEC, changed, CPU)


def test_the_first_call_that_asks_the_same_serves_and_a_number_names_one(acts):
    def found(spec, number=""):
        return captured_family(f"captured:acts.safetensors{number}", spec, acts.parent)

    assert found(SPEC).call == 0
    forward = SPEC.replace(direction="forward", dtype="bf16")
    assert found(forward).call == 0  # a training call serves a forward case, and types are converted
    assert found(forward, "#1").call == 1
    assert found(SPEC.replace(mask=Mask(2, 0))).call == 2
    inputs = draw(forward, found(forward), CPU)
    assert inputs.grad_out is None
    assert torch.equal(inputs.q, values(SPEC)["q"].bfloat16())
    for changes, number, message in (
        ({"seqlen_q": 6}, "", "seqlen_q is 5, not 6"), ({"mask": Mask()}, "", "mask is causal, not none"),
        ({}, "#1", "no backward ran"), ({}, "#3", "0 to 2"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            found(SPEC.replace(**changes), number)
    with pytest.raises(InputError, match="names a file"):
        captured_family("captured:", SPEC, acts.parent)
    with pytest.raises(InputError, match="another question"):
        draw(SPEC.replace(seqlen_q=6), found(SPEC), CPU)


def test_values_that_are_not_finite_here_or_in_the_sweep_s_dtype_are_refused(tmp_path):
    for name, value, dtype, message in (
        ("k", torch.nan, "fp32", "k of captured:x.* not finite"),
        ("grad_out", torch.inf, "fp32", "grad_out of .* not finite"),
        ("v", 1e5, "fp16", "v of .* too large for fp16"),
    ):
        tensors = values(SPEC)
        tensors[name][0, 0, 0, 0] = value
        written(tmp_path / "x.safetensors", [SPEC], [tensors])
        with pytest.raises(InputError, match=message):
            draw(SPEC.replace(dtype=dtype), read_captured(tmp_path / "x.safetensors").family(0), CPU)


def content(index, tensors):
    return save(tensors, {KEY: json.dumps(index)})


def changed(acts, change):
    """The file's content after its index and tensors were changed."""
    raw = acts.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    index = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"][KEY])
    tensors = {
        f"{number}.{name}": x
        for number in range(3)
        for name, x in read_captured(acts).tensors(number).items()
    }  # fmt: skip
    change(index, tensors)
    return content(index, tensors)


HOSTILE = {
    "truncated": (lambda raw: raw[:-1], "safetensors"),
    "a header beyond the file": (lambda raw: struct.pack("<Q", 2**40) + raw[8:], "header of at most"),
    "a huge header": (lambda raw: struct.pack("<Q", 2**25) + b" " * 2**25, "header of at most"),
    "another's tensors": (lambda raw: save({"0.q": torch.zeros(1)}), "metadata"),
    "deep metadata": (lambda raw: save({"0.q": torch.zeros(1)}, {KEY: "[" * 10**5}), "metadata"),
}
CHANGES = {
    "too many calls": (lambda index, tensors: index.update(calls=index["calls"][:1] * 4097), "calls"),
    "an endless name": (lambda index, tensors: index["calls"][0].update(name="x" * 101), "name"),
    "a name that steers a terminal": (lambda index, tensors: index["calls"][0].update(name="\x1b[2J"), "printable"),
    "an impossible spec": (lambda index, tensors: index["calls"][0]["spec"].update(kv_heads=3), "multiple of kv_heads"),
    "a spec without a mask": (lambda index, tensors: index["calls"][0]["spec"].update(mask=None), "mask"),
    "an FP8 spec": (
        lambda index, tensors: index["calls"][1]["spec"].update(dtype="e4m3", descale="head"),
        "captured tensors are",
    ),
    "another shape": (lambda index, tensors: index["calls"][0]["spec"].update(seqlen_q=6), r"'0\.grad_out' of fp32"),
    "another dtype": (lambda index, tensors: tensors.update({"2.v": tensors["2.v"].half()}), r"'2\.v' of fp32"),
    "an unknown dtype": (lambda index, tensors: tensors.update({"2.v": tensors["2.v"].to(torch.int32)}), "I32"),
    "a missing tensor": (lambda index, tensors: tensors.pop("1.k"), r"found no tensor '1\.k'"),
    "a tensor too many": (lambda index, tensors: tensors.update(x=torch.zeros(1)), "expected no tensor 'x'"),
    "a part of nothing": (lambda index, tensors: index["calls"][0].update(kv_heads=[0]), "belong together"),
}


@pytest.mark.parametrize("kind", [*HOSTILE, *CHANGES])
def test_a_corrupt_file_or_one_that_lies_is_malformed(acts, kind):
    change, message = HOSTILE.get(kind) or CHANGES[kind]
    acts.write_bytes(change(acts.read_bytes()) if kind in HOSTILE else changed(acts, change))
    with pytest.raises(MalformedFileError, match=message) as caught:
        read_captured(acts)
    assert str(caught.value).startswith(f"{acts}: expected ")


@given(st.binary(max_size=300), st.integers(0, 200))
def test_any_bytes_are_malformed_never_a_crash(tmp_path_factory, noise, place):
    path = tmp_path_factory.mktemp("any") / "noise.safetensors"
    save_file({"0.q": torch.zeros(2)}, path, {KEY: "{}"})
    raw = path.read_bytes()
    path.write_bytes(raw[:place] + noise + raw[place + len(noise) :])
    with pytest.raises(MalformedFileError):
        read_captured(path)
