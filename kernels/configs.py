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
    followed the batch size or T would give a sequence other bits in other company."""
    block_k = max(16, _power_of_2(key_width))
    return RecurrentConfig(block_v=max(8, min(32, 4096 // block_k, _power_of_2(value_width))), num_warps=1)


def recurrent_step_config(key_width: int, value_width: int) -> RecurrentConfig:
    block_k = max(16, _power_of_2(key_width))
    return RecurrentConfig(block_v=max(8, min(8192 // block_k, _power_of_2(value_width))), num_warps=4)


def _power_of_2(width: int) -> int:
    """The least power of two that is not below ``width``."""
    return 1 << (width - 1).bit_length()


@dataclass(frozen=True)
class ChunkConfig:
    """chunk_kda's stages: warps, register caps (None: the compiler's choice) and depths of the software pipelines."""

    prepare_warps: int
    prepare_registers: int | None
    scan_warps: int
    scan_stages: int
    backward_scan_stages: int
    inputs_warps: int


def chunk_config(padded_key_width: int, full_precision: bool) -> ChunkConfig:
    """From the widths and the operands' type alone: a sequence's bits may not depend on what else is in the batch."""
    wide = padded_key_width > 128
    return ChunkConfig(
        prepare_warps=8 if full_precision else 4,
        prepare_registers=None,
        scan_warps=8 if wide else 4,
        scan_stages=1 if full_precision or wide else 3,
        backward_scan_stages=1 if full_precision or wide else 2,
        inputs_warps=8,
    )
