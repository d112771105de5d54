"""Programs: text, roles, and what a model adds, as values that run when they are read."""

from .decorating import Program, program
from .lm import LM
from .states import Part
from .tables import captures, to_frame
from .vocabulary import assistant, capture, gen, image, json, regex, select, system, user
from .watching import Watch

__all__ = [
    "LM",
    "Part",
    "Program",
    "Watch",
    "assistant",
    "capture",
    "captures",
    "gen",
    "image",
    "json",
    "program",
    "regex",
    "select",
    "system",
    "to_frame",
    "user",
]
