"""A program as a notebook shows it."""

from __future__ import annotations

from html import escape

from .states import Piece, State

CELL = "border-left:3px solid {};padding:2px 8px;margin:4px 0;white-space:pre-wrap;overflow-wrap:anywhere"
COLORS = {"system": "#999", "user": "#4a7", "assistant": "#47a"}
ROLE = "font-size:75%;color:#888"
GENERATED = "background:rgba(80,160,255,.18)"


def html(state: State) -> str:
    """The conversation turn by turn, what was generated marked, captures named. All text is escaped."""
    turns = [turn(found.role if found else None, pieces) for found, pieces in state.turns()]
    return f'<div class="outlines-like">{"".join(turns)}</div>'


def turn(role: str | None, pieces: list[Piece]) -> str:
    """One turn."""
    head = f'<div style="{ROLE}">{escape(role)}</div>' if role else ""
    return f'<div style="{CELL.format(COLORS.get(role or "", "#ccc"))}">{head}{"".join(map(shown, pieces))}</div>'


def shown(piece: Piece) -> str:
    """One piece of a turn."""
    if piece.content is not None:
        return image(str(piece.content.get("image_url", {}).get("url", "")))
    if not piece.generated:
        return escape(piece.text)
    title = f' title="{escape(piece.name)}"' if piece.name else ""
    name = f'<sub style="{ROLE}">{escape(piece.name)}</sub>' if piece.name else ""
    return f'<span style="{GENERATED}"{title}>{escape(piece.text)}</span>{name}'


def image(url: str) -> str:
    """An image that was given whole; of one at an address only the address, as showing a program must fetch nothing."""
    if url.startswith("data:image/"):
        return f'<img src="{escape(url)}" style="max-width:256px;max-height:256px"/>'
    return f"[image {escape(url)}]"
