"""Two additions to MkDocs: links that leave docs/, and a check that the site fetches nothing.

The pages are read in two places.  On a code host ``../README.md`` is a link; the site holds docs/ alone, so there such
a link goes to the repository (``extra.repository`` of mkdocs.yml) or, where that is not known, becomes the file's name.
"""

from __future__ import annotations

import logging
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_log = logging.getLogger("mkdocs.hooks.links")  # a warning there is an error of `mkdocs build --strict`

_FENCE = re.compile(r"^ *(```|~~~)")
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<path>[^)\s:]+)\)")
_FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src"}
_HARMLESS = {"canonical", "prev", "next", "edit"}  # relations of a <link> that a browser does not load


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with its links out of docs/ changed to links into the repository."""
    here = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    repository, branch = config.extra["repository"].rstrip("/"), config.extra["branch"]

    def moved(link: re.Match[str]) -> str:
        path, _, anchor = link["path"].partition("#")
        target = posixpath.normpath(posixpath.join(here, path))
        if not path or target.startswith("docs/"):
            return link[0]
        if target.startswith("..") or not (_ROOT / target).exists():
            _log.warning("%s links to %s, and the repository has no %s", page.file.src_uri, link["path"], target)
            return link[0]
        if not repository:
            name = posixpath.basename(target)
            named = link["text"].strip("`") in (target, name, posixpath.splitext(name)[0])
            return f"`{target}`" if named else f"{link['text']} (`{target}`)"
        kind = "tree" if (_ROOT / target).is_dir() else "blob"
        return f"[{link['text']}]({repository}/{kind}/{branch}/{target}{anchor and '#' + anchor})"

    fenced, lines = False, []
    for line in markdown.split("\n"):
        if _FENCE.match(line):
            fenced = not fenced
        lines.append(line if fenced else _LINK.sub(moved, line))
    return "\n".join(lines)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The unchanged page; warns of everything that a browser would fetch from another host."""
    for place in _fetched(output):
        _log.warning("%s would fetch %s", page.file.src_uri, place)
    return output


class _Fetches(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        place = values.get(_FETCHED.get(tag, "")) or ""
        relations = set((values.get("rel") or "").split())
        if re.match(r"(https?:)?//", place) and not relations & _HARMLESS:
            self.found.append(place)


def _fetched(html: str) -> list[str]:
    """The addresses on other hosts that a browser loads when it shows the HTML."""
    parser = _Fetches()
    parser.feed(html)
    return parser.found
