"""Paths, addresses and names are found in any text, and the words of libraries and compilers are not taken for them."""

import getpass
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.harness.results.privacy import local_names, private_part

WORDS = st.text(st.characters(codec="utf-8"), max_size=40)
NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789_-", min_size=3, max_size=12)


@given(WORDS, NAMES, NAMES, WORDS, st.sampled_from(["/{}/{}", "~/{}/{}", "C:\\{}\\{}", "../{}/{}", "file:///{}/{}"]))
def test_a_path_is_found_in_any_text(before: str, one: str, two: str, after: str, form: str) -> None:
    assert private_part(f"{before} {form.format(one, two)} {after}")


@given(WORDS, NAMES, WORDS)
def test_a_name_is_found_as_a_whole_word_in_any_case(before: str, name: str, after: str) -> None:
    for text in (name, name.upper(), name.title()):
        assert private_part(f"{before} {text} {after}", {name})
    assert private_part(f"xx{name}xx", {name}) is None


@pytest.mark.parametrize(
    "text",
    [
        "see https://build.acme.example/1", "alice@acme", "connect to 10.1.2.3 failed", "on node7.acme.corp",
        "in /tmp", "File \"/root/x.py\", line 3", "~alice/x", "\\\\server\\share", "lib='/opt/x'", "scp host:/srv/data",
    ],
)  # fmt: skip
def test_places_of_all_kinds_are_found(text: str) -> None:
    assert private_part(text)


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: Ninja build failed. Ninja output:", "the error of out is 0.142, beyond 0.12", "3/4 of all",
        "transformer-engine 2.20.2 on cuDNN 91900", "Linux-6.18.44-x86_64-with-glibc2.39", "580.159.04", "1.2.3.4",
        "Intel(R) Xeon(R) Processor @ 2.70GHz", "forward/backward", "2.11.0+cu130", "torch.cuda.OutOfMemoryError: x",
        "captured:layers.0", "flash-attn-4 4.0.0b36 with nvidia-cutlass-dsl 4.8.1", "4 GB / 8 GB",
    ],
)  # fmt: skip
def test_messages_of_libraries_are_not_private(text: str) -> None:
    assert private_part(text, {"alice"}) is None


def test_the_names_of_here_are_asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.acme.example")
    assert {"alice", "node17", "node17.acme.example"} <= local_names()
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    assert "root" not in local_names()

    def nobody() -> str:
        raise KeyError("uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert "node17" in local_names()
