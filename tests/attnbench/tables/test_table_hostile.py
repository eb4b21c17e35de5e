"""Corrupted table files: each is ignored with one warning, or gives a valid choice.

Every file is used like a user's own table: read from the cache folder, loaded and used for a choice.
"""

import json
import random
import warnings
from collections import Counter
from pathlib import Path

import pytest
from choices import CPU, KNOWN, entry, spec
from fakes import an_environment
from file_corruption import flip_bits, restructure_json, splice

from attnbench import AttentionSpec, Mask, Plan
from attnbench.choosing.selector import choose
from attnbench.errors import AttnbenchWarning, NoPlanError
from attnbench.state import forget
from attnbench.tables.environment import Environment
from attnbench.tables.table import Entry, Table
from attnbench.tables.user_table import known_tables, user_table_path
from examples import examples

HERE = an_environment()
FILES = examples(300, 10_000)


TABLE = Table.from_entries(
    HERE,
    [
        made
        for at in (spec(), spec(seqlen_q=4096, mask=Mask(None, 0)), spec(kv_heads=2, direction="training"))
        for tail in ([">slow:bf16"] if at.training else [""])
        for made in (
            entry(f"slow:bf16{tail}", 3.0, at, normal=0.002),
            entry(f"fast:bf16{tail}", 2.0, at, normal=0.002, outlier=0.003),
            entry(f"fast:fp8{tail}", 1.0, at, normal=0.05, outlier=0.09),
        )
    ]
    + [Entry(spec(batch=2), Plan("fast:bf16"), "crashed", reason="it broke")],
)
ASKED = [spec(), spec(kv_heads=2, direction="training"), spec(seqlen_q=3000, mask=Mask(None, 0)), spec(head_dim=128)]


@pytest.fixture(autouse=True)
def user_table_file(monkeypatch):
    monkeypatch.setattr(Environment, "detect", classmethod(lambda *_: HERE))
    path = user_table_path(HERE)
    TABLE.save(path)
    forget()
    yield path
    forget()


def truncate(whole: bytes, chance: random.Random) -> bytes:
    return whole[: chance.randrange(len(whole))]


def replace_digit(whole: bytes, chance: random.Random) -> bytes:
    """Replaces one digit, so that most files are still tables."""
    places = [place for place, byte in enumerate(whole) if 48 <= byte <= 57]
    place = chance.choice(places)
    return whole[:place] + chance.choice([b"0", b"9", b"-", b".", b"e", b"99"]) + whole[place + 1 :]


def change_encoding(whole: bytes, chance: random.Random) -> bytes:
    return whole.decode().encode(chance.choice(["utf-16", "utf-32", "utf-8-sig", "utf-7", "cp037"]))


MUTATIONS = [restructure_json] * 4 + [
    flip_bits,
    flip_bits,
    truncate,
    splice,
    splice,
    replace_digit,
    replace_digit,
    change_encoding,
]


def check_outcome(path: Path) -> str:
    """``missed`` if the file was ignored with one warning, or ``used`` without a warning."""
    forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        known = known_tables(CPU)
    assert all(each.category is AttnbenchWarning and str(each.message).isprintable() for each in caught)
    assert len(caught) <= 1
    if caught:
        assert known.tables == ()
    for number, asked in enumerate(ASKED[:1] if caught else ASKED):
        for fp8 in (False, True):
            assert_choice_is_valid(asked, fp8, shown=fp8 and number == 0 and not caught)
    return "missed" if caught else "used"


def assert_choice_is_valid(asked: AttentionSpec, fp8: bool, shown: bool) -> None:
    """Asserts for any table that a choice obeys the rules, or that no plan is accurate enough."""
    try:
        choice = choose(asked, CPU, fp8=fp8, known=KNOWN)
    except NoPlanError:
        return
    assert choice.plan in KNOWN.plans(asked)
    assert fp8 or not choice.plan.fp8
    entries = known_tables(CPU).at(asked)
    if choice.plan in entries:
        assert entries[choice.plan].usable
        assert entries[choice.plan].worst[0] <= choice.budget
    elif choice.plan.fp8:
        assert 0 < choice.chosen.error <= choice.budget  # vouched for by its neighbours, never by rule
    if shown:
        assert choice.to_text().replace("\n", "").isprintable()
        json.dumps(choice.to_dict(), allow_nan=False)


def test_hostile_files_crash_nothing(user_table_file):
    whole = user_table_file.read_bytes()
    outcomes: Counter[str] = Counter()
    for number in range(FILES):
        chance = random.Random(number)
        user_table_file.write_bytes(MUTATIONS[number % len(MUTATIONS)](whole, chance))
        outcomes[check_outcome(user_table_file)] += 1
    assert min(outcomes.values()) > FILES // 20  # the mutations are neither too mild nor too rough
    assert outcomes.keys() == {"missed", "used"}
