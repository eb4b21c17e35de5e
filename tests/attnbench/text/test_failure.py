"""The one-line summary of an exception contains the cause, even if compilers and frameworks wrapped it."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.text.failure import in_one_line

COMPILER = """C++ compile error

Command:
g++ /tmp/main.cpp -Werror=all -o /tmp/main.so

Output:
/tmp/a b/vec.h:245:13: warning: overflow in conversion
{line}
collect2: error: ld returned 1 exit status
"""


class CompilerError(RuntimeError):
    """Like torch's: the cause is an attribute, and the message repeats it after an uninformative first line."""

    def __init__(self, inner):
        super().__init__(f"backend='inductor' raised:\n{type(inner).__name__}: {inner}")
        self.inner_exception = inner


def raise_and_catch(outer, inner=None):
    """Raises and catches the exception, so that it has a traceback."""
    try:
        try:
            if inner is not None:
                raise inner
        except BaseException as cause:
            raise outer from cause
        raise outer
    except type(outer) as error:
        return error


@pytest.mark.parametrize(
    "line",
    [
        "g++: fatal error: b/main.cpp: No such file or directory",
        "/usr/bin/ld: cannot find -ltorch: No such file or directory",
        "kernel.cu(12): error: identifier x is undefined",
        "ptxas error   : Entry function uses too much shared data",
    ],
)
def test_the_compilers_error_line_is_kept(line):
    inner = raise_and_catch(RuntimeError(COMPILER.format(line=line)), subprocess.CalledProcessError(1, ["g++"]))
    assert in_one_line(inner) == f"RuntimeError: C++ compile error: {line}"
    assert in_one_line(CompilerError(inner)) == f"CompilerError: RuntimeError: C++ compile error: {line}"


def test_an_exception_without_a_message_names_its_source_line():
    with pytest.raises(AssertionError) as silent:
        raise AssertionError
    outer = raise_and_catch(RuntimeError("AssertionError:\n  target: flex_attention"), silent.value)
    summary = in_one_line(CompilerError(outer))
    assert summary.startswith("CompilerError: AssertionError in test_failure.py:")
    assert summary.endswith("raise AssertionError")
    assert in_one_line(KeyError()) == "KeyError"


def test_an_explicit_cause_is_appended_unless_the_message_contains_it():
    for message, added in (("cannot load", " (caused by OSError: no space is left)"), ("no space is left: a", "")):
        error = raise_and_catch(ValueError(message), OSError("no space is left"))
        assert in_one_line(error) == f"ValueError: {message}{added}"


def test_an_implicit_context_is_not_reported_as_the_cause():
    error = RuntimeError("out of registers\nand more")
    error.__context__ = KeyError("key")
    assert in_one_line(error) == "RuntimeError: out of registers"


@given(st.lists(st.text(), max_size=4), st.booleans())
def test_the_summary_is_one_line_of_bounded_length(texts, wrapped):
    error = RuntimeError("\n".join(texts))
    summary = in_one_line(CompilerError(error) if wrapped else raise_and_catch(ValueError(":"), error))
    assert len(summary.splitlines()) == 1
    assert len(summary) < 1500


def test_circular_causes_terminate():
    one, other = RuntimeError("one:"), RuntimeError("other:")
    one.__cause__, other.__cause__ = other, one
    assert in_one_line(one).startswith("RuntimeError")
