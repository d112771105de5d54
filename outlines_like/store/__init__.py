"""Answers kept on disk: many keys in, many values out, and nothing in the folder is ever believed without a check."""

from .folders import default_folder
from .stores import Store

__all__ = ["Store", "default_folder"]
