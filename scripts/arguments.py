"""Kinds of command-line arguments that the scripts share; a mistake is told before anything has run."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

MOST = 2**31 - 1


def at_least(least: int) -> Callable[[str], int]:
    """An ``argparse`` type: an integer from ``least`` on."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if not least <= value <= MOST:
            raise argparse.ArgumentTypeError(f"must be at least {least} and at most {MOST}, got {value}")
        return value

    return whole


def output_file(text: str) -> Path:
    """An ``argparse`` type: a file that can be written, in a folder that is there or can be made."""
    path = Path(text)
    try:
        if path.is_dir() or not path.name:
            raise argparse.ArgumentTypeError(f"{text!r} is a folder")
        there = next(parent for parent in path.absolute().parents if parent.exists())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[:100]!r}: {error.strerror}") from None
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: {there} is no folder")
    if not os.access(path if path.exists() else there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written to")
    return path


def picture(text: str) -> Path:
    """An ``argparse`` type: a file of a kind that matplotlib writes."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise argparse.ArgumentTypeError("needs matplotlib") from None
    kinds = Figure().canvas.get_supported_filetypes()
    path = output_file(text)
    if path.suffix[1:].lower() not in kinds:
        raise argparse.ArgumentTypeError(f"{text!r} must end in one of .{', .'.join(sorted(kinds))}")
    return path
