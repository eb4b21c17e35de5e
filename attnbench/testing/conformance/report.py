"""The report of the conformance suite, for a terminal and for a file under ``results/``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ...problem.spec import AttentionSpec
from ...tables.environment import Environment
from ...text.printable import printable

__all__ = ["Finding", "Outcome", "Report"]

Outcome = Literal["passed", "failed", "skipped"]

_LONGEST = 400  # characters of one sentence: libraries put whole traces into their messages


@dataclass(frozen=True)
class Finding:
    """A check's result for a plan: ``detail`` with numbers, ``spec`` the smallest failing one."""

    plan: str
    check: str
    outcome: Outcome
    detail: str
    spec: AttentionSpec | None = None
    look: str = ""

    def __str__(self) -> str:
        outcome = self.outcome.upper() if self.outcome == "failed" else self.outcome
        lines = [f"  {outcome:8} {self.check:15} {_one_line(self.detail)}"]
        lines += [f"  {'':8} {'smallest spec':15} {self.spec}"] if self.spec is not None else []
        lines += [f"  {'':8} {'look at':15} {self.look}"] if self.look else []
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """The findings about ``backend`` (the requested name), as text and as Markdown."""

    backend: str
    device: str
    version: str
    seed: int
    environment: Environment
    findings: tuple[Finding, ...]

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The failed checks."""
        return tuple(each for each in self.findings if each.outcome == "failed")

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing failed."""
        return not self.failures and any(each.outcome == "passed" for each in self.findings)

    @property
    def summary(self) -> str:
        """How many checks passed, failed and were skipped."""
        kinds: tuple[Outcome, ...] = ("passed", "failed", "skipped")
        return ", ".join(f"{sum(each.outcome == kind for each in self.findings)} {kind}" for kind in kinds)

    @property
    def heading(self) -> str:
        """What is checked, and where."""
        conditions = ", ".join(f"{name} {value}" for name, value in self._conditions())
        lines = f"{self.backend} ({self.version}) on {self.device}, seed {self.seed}", conditions
        return "\n".join(map(printable, lines))

    def __str__(self) -> str:
        parts = [self.heading]
        parts += ["\n".join([plan, *map(str, findings)]) for plan, findings in self._by_plan()]
        return "\n\n".join([*parts, self.summary])

    def to_markdown(self) -> str:
        """The same as a Markdown document that says where it was made."""
        lines = [
            f"# Conformance of `{self.backend}`",
            "",
            f"`check_backend({self.backend!r}, seed={self.seed})`: **{self.summary}**.",
            "",
            "| | |",
            "|---|---|",
            f"| backend | {_cell(self.version)} |",
            f"| device | {_cell(self.device)} |",
        ]
        lines += [f"| {name} | {_cell(value)} |" for name, value in self._conditions()]
        for plan, findings in self._by_plan():
            lines += ["", f"## `{plan}`", "", "| check | outcome | found |", "|---|---|---|"]
            for each in findings:
                details = [_cell(each.detail)]
                details += [f"smallest spec: `{each.spec}`"] if each.spec is not None else []
                details += [f"look at: {_cell(each.look)}"] if each.look else []
                outcome = f"**{each.outcome}**" if each.outcome == "failed" else each.outcome
                lines.append(f"| {each.check} | {outcome} | {'<br>'.join(details)} |")
        return "\n".join(lines) + "\n"

    def _by_plan(self) -> Iterator[tuple[str, list[Finding]]]:
        for plan in dict.fromkeys(each.plan for each in self.findings):
            yield plan, [each for each in self.findings if each.plan == plan]

    def _conditions(self) -> Iterator[tuple[str, str]]:
        here = self.environment
        facts = {
            "driver": here.driver,
            "CUDA": here.cuda,
            "cuDNN": here.cudnn,
            "torch": here.torch,
            "triton": here.triton,
            "python": here.python,
            "attnbench": here.attnbench,
            "commit": here.commit,
        }
        yield from ((name, value) for name, value in facts.items() if value is not None)


def _one_line(text: str) -> str:
    """A sentence without the line breaks and control characters that libraries put into their messages."""
    plain = printable(" ".join(text.split()))
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 1] + "…"


def _cell(text: str) -> str:
    """A cell of a Markdown table, in which nothing of the text is taken for markup."""
    escaped = _one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\")
    return "".join(f"\\{char}" if char in "|*_`[" else char for char in escaped)
