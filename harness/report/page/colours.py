"""The page's colours, light and dark, for its style sheet and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attnbench.kernels.plan import Plan, backend_of

__all__ = ["OTHERS", "THEMES", "Theme", "contrast", "hues_of", "style_variables"]

Theme = Literal["light", "dark"]
# hN are for marks, lines and names, tN are backgrounds of text in `ink`; all other backends share the last of each.
# The light theme has no colour twice: a figure's colours are recognised by them (attnbench.harness.report.page.vector).
THEMES: dict[Theme, dict[str, str]] = {
    "light": {
        "ink": "#1b1f24",
        "soft": "#545c66",
        "ground": "#ffffff",
        "panel": "#f4f6f8",
        "line": "#c9d0d8",
        "link": "#0b57b0",
        "good": "#1a6b35",
        "bad": "#a8271f",
        "h0": "#1f6fb5",
        "h1": "#b8500f",
        "h2": "#2c8040",
        "h3": "#8a4fb0",
        "h4": "#b3263c",
        "h5": "#0e7f86",
        "h6": "#856a00",
        "h7": "#a83f86",
        "h8": "#6a7280",
        "t0": "#d3e6f8",
        "t1": "#fbdfc9",
        "t2": "#d3eed6",
        "t3": "#e9dcf4",
        "t4": "#f9d9dc",
        "t5": "#cdeeef",
        "t6": "#f3eab8",
        "t7": "#f7daed",
        "t8": "#e5e8ec",
    },
    "dark": {
        "ink": "#e8ebef",
        "soft": "#a7b0bb",
        "ground": "#14171b",
        "panel": "#1d2127",
        "line": "#3a424d",
        "link": "#7db7ff",
        "good": "#7fd08f",
        "bad": "#ff9a92",
        "h0": "#5aa9ec",
        "h1": "#f08a45",
        "h2": "#5fbf73",
        "h3": "#bf8ae6",
        "h4": "#f0707f",
        "h5": "#3fc0c6",
        "h6": "#d6b52e",
        "h7": "#e57fc0",
        "h8": "#98a1ad",
        "t0": "#173a5a",
        "t1": "#56301a",
        "t2": "#1b4426",
        "t3": "#402a54",
        "t4": "#561f28",
        "t5": "#0f4448",
        "t6": "#453a0c",
        "t7": "#4f2341",
        "t8": "#333941",
    },
}
OTHERS = 8  # the hue of all backends without one of their own


def hues_of(plans: Sequence[Plan]) -> dict[str, int]:
    """The hue of each forward kernel's backend; the first backends get hues of their own."""
    backends = list(dict.fromkeys(backend_of(plan.forward) for plan in plans))
    return {backend: min(place, OTHERS) for place, backend in enumerate(backends)}


def style_variables(theme: Theme) -> str:
    """The theme as declarations of CSS variables."""
    return "".join(f"--{name}:{value};" for name, value in THEMES[theme].items())


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2.2, definitions of contrast ratio and relative luminance)."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
