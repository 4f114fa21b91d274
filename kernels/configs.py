"""Tuned launch configurations, by device and shape class.

A configuration is chosen on the host from a call's shapes and nothing else: the same call gets the same program, and
the same bits, every time. Autotuning is something a user asks for (``scripts/benchmark.py``), never
something that happens in a first call. An unknown device gets the entry of the nearest one.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RecurrentConfig:
    """recurrent_kda and recurrent_kda_step: one program holds the state tile [K, block_v] in registers."""

    block_v: int
    num_warps: int


def recurrent_config(key_width: int, value_width: int) -> RecurrentConfig:
    """The scan's tile. It depends on the widths alone: the order of the sums over K goes with the tile, so a tile that
    followed the batch size would give a sequence other bits in a larger batch."""
    del key_width, value_width
    return RecurrentConfig(block_v=8, num_warps=1)


def recurrent_step_config(key_width: int, value_width: int) -> RecurrentConfig:
    del key_width, value_width
    return RecurrentConfig(block_v=32, num_warps=4)
