"""Tuned launch configurations, by device and shape class.

A configuration is chosen on the host from a call's shapes and nothing else: the same call gets the same program, and
the same bits, every time. Autotuning is something a user asks for (``scripts/benchmark.py``), never
something that happens in a first call. An unknown device gets the entry of the nearest one.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RecurrentConfig:
    """recurrent_kda and recurrent_kda_step: one program holds the state tile [K, block_v] in registers.

    Every tile below lays K out over at most eight threads, which is what the kernels' fixed order of sums asks for: so
    the choice may follow the batch size and T and change no bit.
    """

    block_v: int
    num_warps: int
    registers: int | None = None
    """A cap for the compiler, None for its own choice."""


def recurrent_config(key_width: int, value_width: int, rows: int, one_token: bool) -> RecurrentConfig:
    """The scan's tile, on an H200, from the number of sequences times heads and whether each has one token.

    Few rows want many programs; one token is bound by bandwidth, and wide tiles read longer pieces of a state's row;
    many tokens are bound by instructions, and one warp that owns its columns needs no barrier in its sums.
    """
    if rows <= 64:
        block_v, num_warps = 16, 1
    elif one_token and rows >= 2048:
        block_v, num_warps = 64, 4
    else:
        block_v, num_warps = 32, 1
    return _fit(block_v, num_warps, key_width, value_width)


def recurrent_step_config(key_width: int, value_width: int, rows: int) -> RecurrentConfig:
    """The decode step's tile, likewise."""
    if rows < 1024:
        return _fit(16, 1, key_width, value_width)
    return _fit(
        64, 4, key_width, value_width, registers=128
    )  # four programs to an SM; the compiler's choice gives three


def _fit(
    block_v: int, num_warps: int, key_width: int, value_width: int, registers: int | None = None
) -> RecurrentConfig:
    """The tile cut down to the registers of a wide K, and to a narrow V."""
    if key_width > 128:
        block_v, num_warps, registers = (*((32, 2) if num_warps > 1 else (16, 1)), None)
    width = max(8, _power_of_2(value_width))
    if width < block_v:
        block_v, num_warps, registers = width, 1, None
    return RecurrentConfig(block_v, num_warps, registers)


def _power_of_2(width: int) -> int:
    """The least power of two that is not below ``width``."""
    return 1 << (width - 1).bit_length()


@dataclass(frozen=True)
class ChunkConfig:
    """chunk_kda's stages: warps, columns of a tile, register caps (None: the compiler's choice) and depths of the
    software pipelines."""

    prepare_warps: int
    prepare_block: int
    prepare_stages: int
    prepare_registers: int | None
    scan_warps: int
    scan_stages: int
    backward_scan_stages: int
    inputs_warps: int
    inputs_block: int


def chunk_config(padded_key_width: int, full_precision: bool) -> ChunkConfig:
    """From the widths and the operands' type alone: a sequence's bits may not depend on what else is in the batch."""
    wide = padded_key_width > 128
    return ChunkConfig(
        prepare_warps=4,
        prepare_block=64,
        prepare_stages=1,
        prepare_registers=None,
        scan_warps=8 if wide else 4,
        scan_stages=1 if full_precision or wide else 3,
        backward_scan_stages=1 if full_precision or wide else 2,
        inputs_warps=8,
        inputs_block=64,
    )
