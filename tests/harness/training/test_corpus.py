import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnbench.errors import InputError
from attnbench.harness.training.data import text
from attnbench.harness.training.data.corpus import load, samples_of
from attnbench.harness.training.data.documents import IGNORED, Documents, packed, padded
from attnbench.harness.training.data.text import BOUNDARY, File, Text

TEXTS = st.lists(st.binary(min_size=0, max_size=40), min_size=1, max_size=12)


def written(folder: Path, texts: list[bytes]) -> tuple[list[File], list[list[int]]]:
    """Files of these texts, and the tokens of each."""
    files = []
    for number, each in enumerate(texts):
        path = folder / str(number)
        path.write_bytes(each)
        files.append(File(path.name, path, len(each)))
    return files, [[*each, BOUNDARY] for each in texts]


@given(TEXTS, st.data())
def test_a_window_is_what_the_files_hold(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], data: st.DataObject
) -> None:
    files, pieces = written(tmp_path_factory.mktemp("text"), texts)
    whole = [token for each in pieces for token in each]
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    part = Text(files).part(first, last)
    assert len(part) == last - first
    start = data.draw(st.integers(0, last - first))
    length = data.draw(st.integers(0, last - first - start))
    assert part.read(start, length).tolist() == whole[first + start : first + start + length]


def test_files_whose_names_are_no_utf8_are_learnt_as_any_other(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xffd.txt")).write_bytes(b"some text " * 20)
    assert len(load(str(tmp_path), 8).train) > 8
    assert len(load(str(tmp_path), 8).digest) == 16


@pytest.mark.parametrize(("step", "rank", "world"), [(0, 1, 1), (0, -1, 2), (-1, 0, 1)])
def test_there_is_no_such_rank(step: int, rank: int, world: int) -> None:
    with pytest.raises(InputError, match="there is no rank"):
        samples_of(step, 4, rank, world)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 6), st.integers(0, 50))
def test_every_world_reads_the_samples_in_order(batch: int, world: int, split: int, steps: int) -> None:
    """``world`` ranks of ``split`` · ``batch`` samples read what world · split ranks of ``batch`` read, none twice."""
    few = [n for step in range(steps) for rank in range(world) for n in samples_of(step, batch * split, rank, world)]
    ranks = world * split
    many = [n for step in range(steps) for rank in range(ranks) for n in samples_of(step, batch, rank, ranks)]
    assert few == many == list(range(steps * batch * world * split))


def test_the_library_is_python_and_its_samples_are_the_seeds() -> None:
    one, again = load("stdlib", 64), load("stdlib", 64)
    assert one.digest == again.digest
    names = {each.name for each in one.train.files}
    held = {each.name for each in one.validation.files}
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= names | held
    assert not names & held
    assert len(one.validation) < 0.2 * len(one.train)
    assert all(name.endswith(".py") and not name.startswith(("test/", "site-packages/")) for name in names)
    drawn = [one.sample(3, number) for number in range(40)]
    assert all(torch.equal(sample, again.sample(3, number)) for number, sample in enumerate(drawn))
    assert len({tuple(sample.tolist()) for sample in drawn}) == 40
    assert not torch.equal(one.sample(4, 0), drawn[0])
    assert all(sample.shape == (65,) and sample.min() >= 0 and sample.max() <= BOUNDARY for sample in drawn)


def test_one_file_is_split_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(bytes(range(65, 91)) * 40)
    corpus = load(str(tmp_path / "one.txt"), 16)
    assert len(corpus.train) + len(corpus.validation) == 26 * 40 + 1
    assert len(corpus.validation) == (26 * 40 + 1) // 20
    starts = {int(corpus.sample(0, number)[0]) for number in range(400)}
    assert len(starts) == 26  # all of it is drawn
    assert not any(BOUNDARY in corpus.sample(0, number) for number in range(400))


def test_the_shortest_text_that_serves(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 33)  # 34 tokens with the boundary: one window of 17 to learn, one to validate
    corpus = load(str(path), 16)
    assert (len(corpus.train), len(corpus.validation)) == (17, 17)
    assert corpus.sample(0, 0).tolist() == [120] * 17
    path.write_bytes(b"x" * 32)
    with pytest.raises(InputError, match="32 bytes, too few for a sample of 17 tokens"):
        load(str(path), 16)


def test_files_and_folders_that_hold_no_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no text file or folder"):
        load(str(tmp_path / "nowhere"), 16)
    with pytest.raises(InputError, match="no file in it"):
        load(str(tmp_path), 16)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match="files are empty"):
        load(str(tmp_path), 16)
    (tmp_path / ".hidden").write_text("x" * 100)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("x" * 100)
    with pytest.raises(InputError, match="files are empty"):
        load(str(tmp_path), 16)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(100))
    with pytest.raises(InputError, match=r"picture\.png is no text"):
        load(str(tmp_path), 16)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads everything, so the refusal is planted."""

    def refused(path: Path, _: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    (tmp_path / "secret.txt").write_text("x" * 100)
    monkeypatch.setattr(text, "open", refused, raising=False)
    with pytest.raises(InputError, match=r"secret\.txt cannot be read: Permission denied"):
        load(str(tmp_path), 16)


def test_a_file_that_is_gone_or_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "fleeting.txt"
    path.write_bytes(b"x" * 4000)
    corpus = load(str(path), 16)
    path.write_bytes(b"x" * 4)
    with pytest.raises(InputError, match=r"fleeting\.txt has become shorter than the 4000 bytes"):
        corpus.sample(0, 0)
    path.unlink()
    with pytest.raises(InputError, match=r"fleeting\.txt cannot be read: No such file"):
        corpus.sample(0, 0)


@given(TEXTS, st.integers(1, 20), st.integers(1, 60), st.data())
def test_documents_are_the_pieces_of_files(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], longest: int, tokens: int, data: st.DataObject
) -> None:
    files, whole = written(tmp_path_factory.mktemp("text"), texts)
    first = data.draw(st.integers(0, len(whole[0]) - 1))
    text_ = Text(files).part(first, sum(map(len, whole)))
    whole[0] = whole[0][first:]
    pieces = [
        each[start : start + longest + 1]
        for each in whole
        for start in range(0, len(each) - 1, longest)
    ]  # fmt: skip
    documents = Documents(text_, longest)
    assert len(documents) == len(pieces)
    if not pieces:
        with pytest.raises(InputError, match="no document"):
            documents.draw(0, 0, tokens)
        return
    sizes = [len(each) - 1 for each in pieces]
    assert documents.mean(lambda n: n * n) == pytest.approx(sum(n * n for n in sizes) / sum(sizes))
    drawn = [each.tolist() for each in documents.draw(0, 0, tokens)]
    assert sum(len(each) - 1 for each in drawn) == tokens
    assert all(each in pieces for each in drawn[:-1])
    assert any(piece[: len(drawn[-1])] == drawn[-1] for piece in pieces)
    assert drawn == [each.tolist() for each in documents.draw(0, 0, tokens)]
    rows, targets = padded(documents.draw(0, 0, tokens), longest)
    flat, next_, positions, starts = packed(documents.draw(0, 0, tokens))
    assert torch.equal(rows[targets != IGNORED], flat[0])
    assert torch.equal(targets[targets != IGNORED], next_[0])
    assert rows.shape[1] <= longest
    assert positions[0].tolist() == [place for each in drawn for place in range(len(each) - 1)]
    assert starts.diff().tolist() == [len(each) - 1 for each in drawn]
