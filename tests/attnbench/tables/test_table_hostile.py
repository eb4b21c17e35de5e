"""Corrupted table files: each is ignored with one warning, or gives a valid choice.

Every file is used like a user's own table: read from the cache folder, loaded and used for a choice.  That choices of
any table stay within the budget holds test_selector.py.
"""

import json
import random
import warnings
from collections import Counter
from contextlib import suppress

import pytest
from choices import CPU, KNOWN, MEASURED, entry, spec, table
from fakes import an_environment
from file_corruption import flip_bits, restructure_json, splice

from attnbench import Mask, Plan
from attnbench.choosing.selector import choose
from attnbench.errors import AttnbenchWarning, NoPlanError
from attnbench.state import forget
from attnbench.tables.environment import Environment
from attnbench.tables.table import Entry
from attnbench.tables.user_table import known_tables, user_table_path
from examples import examples

HERE = an_environment()
FILES = examples(300, 10_000)


TABLE = table(
    *MEASURED.entries.values(),
    entry("fast:fp8", 9.0, spec(seqlen_q=4096, mask=Mask(None, 0)), normal=0.05, outlier=0.09),
    entry("slow:bf16>slow:bf16", 3.0, spec(kv_heads=2, direction="training")),
    Entry(spec(batch=2), Plan("fast:bf16"), "crashed", reason="it broke"),
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


MUTATIONS = [*[restructure_json] * 4, *[flip_bits, splice, replace_digit] * 2, truncate, change_encoding]


def check_outcome() -> str:
    """``missed`` if the file was ignored with one warning, or ``used`` without a warning, for valid choices."""
    forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        known = known_tables(CPU)
    assert [each.category for each in caught] in ([], [AttnbenchWarning])
    if caught:
        assert str(caught[0].message).isprintable()
        assert known.tables == ()
        return "missed"
    for asked in ASKED:
        for fp8 in (False, True):
            with suppress(NoPlanError):
                choice = choose(asked, CPU, fp8=fp8, known=KNOWN)
                assert choice.plan in KNOWN.plans(asked)
                assert choice.to_text().replace("\n", "").isprintable()
                json.dumps(choice.to_dict(), allow_nan=False)
    return "used"


def test_hostile_files_crash_nothing(user_table_file):
    whole = user_table_file.read_bytes()
    outcomes: Counter[str] = Counter()
    for number in range(FILES):
        chance = random.Random(number)
        user_table_file.write_bytes(MUTATIONS[number % len(MUTATIONS)](whole, chance))
        outcomes[check_outcome()] += 1
    assert min(outcomes.values()) > FILES // 20  # the mutations are neither too mild nor too rough
    assert outcomes.keys() == {"missed", "used"}
