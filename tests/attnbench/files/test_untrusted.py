"""Reading untrusted input: only regular files are read, and messages are short and printable."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench import AttentionSpec, Mask, Plan
from attnbench.errors import AttnbenchError, InputError, MalformedFileError
from attnbench.files.untrusted import open_regular
from attnbench.kernels.registry import registry
from attnbench.text.printable import brief, printable

HUGE = 10**10_000  # which Python refuses to write out


def kind_of(value: object) -> str:
    """A parameter's name in a test's: pytest would write it out."""
    return type(value).__name__


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.none().map(lambda _: HUGE) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
)


@given(values)
@settings(max_examples=50)
def test_every_value_is_shown_short_and_printable(value: object) -> None:
    assert brief(value).isprintable()
    assert len(brief([[value] * 99] * 99)) <= 200


@given(st.text())
def test_printable_characters_are_kept_and_others_escaped(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert all(one == other for one, other in zip(text, shown, strict=True) if one.isprintable())


def test_a_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"content"


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_a_path_that_is_not_a_file_is_an_error_without_blocking(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "here"
    {"folder": os.mkdir, "pipe": os.mkfifo, "device": lambda path: os.symlink("/dev/zero", path)}[kind](place)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MalformedFileError, match=f"expected a file, not a {kind}"):
        open_regular(place)
    assert len(os.listdir("/proc/self/fd")) == before


SHAPE = {"batch": 1, "heads": 4, "seqlen_q": 64, "head_dim": 32}
WRONG = [HUGE, -HUGE, "x" * 10**5, "\x1b[2J", [HUGE], {"\x1b": HUGE}, float("nan"), object()]


@pytest.mark.parametrize("value", WRONG, ids=kind_of)
@pytest.mark.parametrize(
    "name", ["batch", "head_dim", "kv_heads", "scale", "softcap", "dtype", "direction", "return_lse"]
)
def test_every_invalid_spec_field_raises_a_short_printable_error(name: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        AttentionSpec.make(**{**SHAPE, name: value})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mask(left=-HUGE),
        lambda: Mask(right=[HUGE]),
        lambda: Mask(alignment="\x1b" * 10**5),
        lambda: Plan.parse("\x1b" * 10**5),
        lambda: registry().backend("9" * 10**6),
        lambda: registry().check("fa3:" + "9" * 10**6),
    ],
)
def test_every_other_invalid_input_raises_a_short_printable_error(make) -> None:
    with pytest.raises(AttnbenchError) as caught:
        make()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1500
