"""Frozen files: a valid one reads back as written, and an invalid one is an error that says where."""

import json
import random
import string
from pathlib import Path

import pytest
from file_corruption import flip_bits, restructure_json, splice
from hypothesis import given
from hypothesis import strategies as st

from attnbench import AttentionSpec, Mask, Plan, freeze
from attnbench.errors import MalformedFileError
from attnbench.freezing.file import SCHEMA, Frozen, FrozenPlan, FrozenQuestion
from examples import examples

FILES = examples(450, 3000)


def spec(**more) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 1, "heads": 4, "seqlen_q": 1024, "head_dim": 64, **more})


SPECS = st.builds(
    spec,
    batch=st.integers(1, 9),
    kv_heads=st.sampled_from([1, 2, 4]),
    seqlen_q=st.integers(1, 2**31 - 1),
    seqlen_kv=st.integers(1, 99) | st.none(),
    head_dim_v=st.sampled_from([None, 8]),
    dtype=st.sampled_from(["bf16", "fp16", "fp64"]),
    scale=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    softcap=st.floats(0, 1e308),
    mask=st.builds(Mask, st.none() | st.integers(0, 9), st.none() | st.integers(0, 9), st.just("bottom-right")),
    direction=st.sampled_from(["forward", "training"]),
    return_lse=st.booleans(),
)
WORDS = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=6)


@st.composite
def choices(draw) -> tuple[FrozenQuestion, FrozenPlan]:
    asked = draw(SPECS)
    family, fp8 = draw(WORDS), draw(st.booleans())
    backend = draw(st.sampled_from(["auto", family]))
    budget = draw(st.none() | st.floats(0, exclude_min=True))
    kernel = f"{family}:{'fp8' if fp8 else 'bf16'}"
    plan = Plan(kernel, "other:bf16" if asked.training else None)
    question = FrozenQuestion.make(draw(st.sampled_from(["cpu", "cuda"])), asked, backend, fp8, budget)
    versions = draw(st.dictionaries(WORDS, st.text(max_size=9).filter(str.isprintable), max_size=3))
    return question, FrozenPlan(plan, versions)


CHOICES = st.lists(choices(), max_size=6, unique_by=lambda item: item[0])


@given(CHOICES, st.randoms(use_true_random=False))
def test_a_file_reads_back_as_written_in_any_order_and_layout(tmp_path_factory, found, chance):
    folder = tmp_path_factory.getbasetemp()
    content = Frozen({"cpu": "CPU", "cuda": "NVIDIA H200"}, dict(found))
    content.save(folder / "one.json")
    assert Frozen.load(folder / "one.json") == content
    Frozen(dict(reversed(content.devices.items())), dict(chance.sample(found, len(found)))).save(folder / "other.json")
    text = (folder / "one.json").read_text()
    assert (folder / "other.json").read_text() == text
    assert sum('"plan"' in line for line in text.splitlines()) == len(found)
    for indent in (None, 4):
        (folder / "other.json").write_text(json.dumps(json.loads(text), indent=indent))
        assert Frozen.load(folder / "other.json") == content


CONTENT = Frozen(
    {"cpu": "CPU", "cuda": "NVIDIA H200"},
    {
        FrozenQuestion("cuda", "auto", True, 0.1, spec()): FrozenPlan(Plan("fa3:fp8"), {"fa3": "2.1 from a wheel"}),
        FrozenQuestion("cuda", "auto", False, None, spec(direction="training", mask=Mask(None, 0))): FrozenPlan(
            Plan("fa3:bf16", "fa4:bf16"), {"fa3": "2.1", "fa4": "4.0.0b36"}
        ),
        FrozenQuestion("cpu", "sdpa-math", False, None, spec(seqlen_q=7)): FrozenPlan(
            Plan("sdpa-math:bf16"), {"sdpa-math": "2.9.0"}
        ),
        FrozenQuestion("cpu", "auto", False, 0.5, spec(kv_heads=2, dtype="fp16")): FrozenPlan(
            Plan("sdpa-flash:fp16"), {"sdpa-flash": "2.9.0"}
        ),
    },
)


@pytest.fixture
def path(tmp_path) -> Path:
    """The path of a valid file."""
    CONTENT.save(tmp_path / "run.choices.json")
    return tmp_path / "run.choices.json"


def test_damaged_files_are_errors_or_valid_choices(path):
    whole, chance, good, messages = path.read_bytes(), random.Random(0), 0, []
    for number in range(FILES):
        path.write_bytes([restructure_json, flip_bits, splice][number % 3](whole, chance))
        try:
            content = Frozen.load(path)
        except MalformedFileError as error:
            messages.append(str(error))
            continue
        good += 1
        for question, answer in content.plans.items():  # what was read keeps the promises of a choice
            assert question.device in content.devices
            assert not answer.plan.fp8 or question.opens_fp8
            assert question.spec.training == (answer.plan.backward is not None)
            assert question.max_error is None or question.max_error > 0
        content.save(path)
        assert Frozen.load(path) == content
    assert FILES / 100 < good < FILES * 0.7
    assert all(words.startswith(str(path)) and words.isprintable() and len(words) < 500 for words in messages)


DAMAGE = {
    "no field": ('"plan": "sdpa-math:bf16", ', "", "plan: Field required"),
    "no plan": ('"sdpa-math:bf16"', '"sdpa-math"', "no kernel name"),
    "a backward too many": ('"sdpa-math:bf16"', '"sdpa-math:bf16>a:bf16"', "not a plan for the direction forward"),
    "a backward too few": ('"fa3:bf16>fa4:bf16"', '"fa3:bf16"', "not a plan for the direction training"),
    "another backend": ('"sdpa-math:bf16"', '"sdpa-flash:bf16"', "not of the backend sdpa-math"),
    "FP8 without opting in": ('"sdpa-flash:fp16"', '"fa3:fp8"', "FP8, which the question does not open"),
    "a budget of none": ('"max_error": 0.5', '"max_error": 0', "max_error: .*greater than 0"),
    "what steers a terminal": ('"mask": {"right": 0}', r'"mask": {"\u001b[2J": 0}', "unexpected keyword"),
    "another spelling of one question": ('"seqlen_q": 7', '"seqlen_q": 7, "kv_heads": 4', None),
    "a device of none": ('"device": "cuda"', '"device": "xpu"', "one of the devices above, not 'xpu'"),
}


@pytest.mark.parametrize("indent", [0, 2])
@pytest.mark.parametrize("kind", DAMAGE)
def test_an_error_names_the_line(path, kind, indent):
    before, after, words = DAMAGE[kind]
    assert before in path.read_text()
    text = path.read_text().replace(before, after)
    path.write_text(json.dumps(json.loads(text), indent=indent) if indent else text)
    if words is None:
        assert Frozen.load(path) == CONTENT
        return
    with pytest.raises(MalformedFileError, match=words) as caught:
        Frozen.load(path)
    assert str(caught.value).isprintable()
    from_there = "\n".join(path.read_text().splitlines()[caught.value.line - 1 :]).lstrip()
    choice = json.JSONDecoder().raw_decode(from_there)[0]  # what begins on that line
    assert after in json.dumps(choice)
    assert after or "plan" not in choice


def test_a_duplicate_spec_is_an_error(path):
    lines = path.read_text().splitlines()
    lines.insert(9, lines[7].rstrip(",") + ",")
    path.write_text("\n".join(lines))
    with pytest.raises(MalformedFileError, match="occurs twice") as caught:
        Frozen.load(path)
    assert caught.value.line == 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected JSON"),
        ('{"schema": "attnbench.table/2"}', SCHEMA),
        (f'{{"schema": "{SCHEMA}"}}', "devices: Field required"),
        (f'{{"schema": "{SCHEMA}", "devices": {{}}, "choices": {{}}}}', "choices: .*array"),
        (f'{{"schema": "{SCHEMA}", "devices": {{}}, "choices": [], "more": 1}}', "more: Extra"),
        ("[" * 100_000, "nested 8 deep at most"),
        (
            json.dumps({"schema": SCHEMA, "devices": dict.fromkeys(map(str, range(99)), "CPU"), "choices": []}),
            "at most 16",
        ),
    ],
)
def test_an_invalid_file_is_an_error_with_its_reason(path, text, words):
    path.write_text(text)
    with pytest.raises(MalformedFileError, match=words):
        freeze(path).start()
