"""Make a figure of matplotlib's part of the page: styles become classes, colours those of the theme, parts get names.

The page's policy forbids style attributes, and figures must follow the page's dark theme.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from markupsafe import Markup

from .colours import THEMES

__all__ = ["Sheet", "inline"]

_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_FONT = re.compile(r"font: (?:([^;]*?) )??([0-9.]+px)[^;]*|font-family:[^;]*;? ?")
_VARIABLES = {value: f"var(--{name})" for name, value in reversed(THEMES["light"].items())}
_COLOUR = re.compile("|".join(_VARIABLES))
_NAMED = ("dots", "mark", "name", "budget")


class Sheet:
    """The style rules of one page's figures: a class for each distinct style."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}

    def named(self, style: str) -> str:
        """The class of a style that matplotlib wrote."""
        themed = _COLOUR.sub(lambda found: _VARIABLES[found[0]], style.lower())
        sized = _FONT.sub(lambda found: f"font-size: {found[2]}" if found[2] else "", themed)  # the page's own letters
        return self._classes.setdefault(sized, f"f{len(self._classes)}")

    @property
    def text(self) -> str:
        """The rules as CSS."""
        return "\n".join(f".{name}{{{style}}}" for style, name in self._classes.items())


def inline(svg: bytes, key: str, label: str, sheet: Sheet, cases: Mapping[str, Sequence[int]]) -> Markup:
    """The figure for the page; its rules are added to ``sheet``.

    ``key`` makes its ids unique on the page, ``label`` is its text for screen readers.  ``cases`` maps the groups
    ``dots-N`` to the numbers of their dots' cases, in order; other named groups become classes (``mark``, ``name``,
    ``budget-N``).
    """
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{_SVG}metadata" or (child.tag == f"{_SVG}style" or child.tag == f"{_SVG}title"):
                parent.remove(child)
    for element in root.iter():
        _set_class(element, sheet)
        if (link := element.attrib.pop(_LINK, None)) is not None:
            element.set("href", link)
    for group in list(root.iter(f"{_SVG}g")):
        _name_group(group, cases)
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == "id":
                element.set(name, f"{key}-{value}")
            elif name == "href":
                element.set(name, f"#{key}-{value.removeprefix('#')}")
            elif value.startswith("url(#"):
                element.set(name, f"url(#{key}-{value.removeprefix('url(#')}")
        element.tag = element.tag.removeprefix(_SVG)
    kept = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label, "class": "figure"}
    root.attrib.clear()
    root.attrib.update(kept)
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # ElementTree has escaped the text


def _set_class(element: ElementTree.Element, sheet: Sheet) -> None:
    style = element.attrib.pop("style", None)
    if style:
        element.set("class", sheet.named(style))


def _name_group(group: ElementTree.Element, cases: Mapping[str, Sequence[int]]) -> None:
    name = group.attrib.get("id", "")
    kind, _, number = name.partition("-")
    if kind not in _NAMED or not number:
        if name and not name.startswith("p"):  # nothing else refers to a group
            del group.attrib["id"]
        return
    del group.attrib["id"]
    group.set("class", f"{kind} {name}")
    if name in cases:
        group.set("data-plan", number)
        dots = [each for each in _leaves(group) if each.tag in (f"{_SVG}use", f"{_SVG}path")]
        for dot, case in zip(dots, cases[name], strict=True):
            dot.set("data-case", str(case))


def _leaves(element: ElementTree.Element) -> list[ElementTree.Element]:
    """The drawn elements below an element, without definitions."""
    if element.tag == f"{_SVG}defs":
        return []
    children = list(element)
    return [element] if not children else [leaf for child in children for leaf in _leaves(child)]
