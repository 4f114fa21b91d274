"""Tuned launch configurations, by device and shape class.

A configuration is chosen on the host from a call's shapes and nothing else: the same call gets the same program, and
the same bits, every time. Autotuning is something a user asks for (``scripts/benchmark.py``), never
something that happens in a first call. An unknown device gets the entry of the nearest one.
"""

from dataclasses import dataclass

from ._device import cdiv, power_of_2


@dataclass(frozen=True)
class RecurrentConfig:
    """recurrent_kda and recurrent_kda_step: one program holds the state tile [K, block_v] in registers."""

    block_v: int
    num_warps: int
    registers: int | None = None
    """A cap for the compiler, None for its own choice."""
    unrolled: bool = False
    """One token without the loop that many take."""


def recurrent_config(key_width: int, value_width: int, rows: int, one_token: bool, packed: bool) -> RecurrentConfig:
    """The scan's tile, on an H200, from the number of sequences times heads and whether each has one token.

    Few rows want many programs; one token is bound by bandwidth, and wide tiles read longer pieces of a state's row;
    many tokens are bound by instructions, and one warp that owns its columns needs no barrier in its sums. Every tile
    here spreads K over at most eight threads, which is what the kernel's fixed order of sums asks for: so the choice
    changes no bit. (Without the loop, tiles of one warp fuse other products and do.)
    """
    unrolled = one_token and not packed and 32 < key_width <= 128 and value_width >= 64
    if rows <= 64:
        config = RecurrentConfig(16, 1)
    elif unrolled:
        # 128 registers let four programs of 64 columns share an SM; the compiler's own choice, three.
        config = RecurrentConfig(64, 4, 128, True) if rows >= 2048 else RecurrentConfig(32, 2, None, True)
    elif one_token and rows >= 2048:
        config = RecurrentConfig(64, 4)
    else:
        config = RecurrentConfig(32, 1)
    return _fit(config, key_width, value_width)


def recurrent_step_config(key_width: int, value_width: int) -> RecurrentConfig:
    """The decode step's tile, one for every batch size: two tiles' programs round differently in the last bit. 128
    registers let four programs share an SM; the compiler's own choice, three."""
    return _fit(RecurrentConfig(block_v=64, num_warps=4, registers=128), key_width, value_width)


def recurrent_conv_step_config(key_width: int, value_width: int) -> RecurrentConfig:
    """The decode step's with the convolutions, where one program owns a head: all of V in one tile where it fits."""
    block_v = 128 if key_width <= 128 and value_width > 64 else 64
    return _fit(RecurrentConfig(block_v, num_warps=4), key_width, value_width)


def _fit(config: RecurrentConfig, key_width: int, value_width: int) -> RecurrentConfig:
    """The tile cut down to the registers of a wide K, and to a narrow V."""
    if key_width > 128:
        config = RecurrentConfig(32, 2) if config.num_warps > 1 else RecurrentConfig(16, 1)
    width = max(8, power_of_2(value_width))
    return config if width >= config.block_v else RecurrentConfig(width, 1)


@dataclass(frozen=True)
class ChunkConfig:
    """chunk_kda's stages: warps, columns of a tile, register caps (None: the compiler's choice) and depths of the
    software pipelines."""

    prepare_warps: int
    prepare_block: int
    prepare_columns: int
    prepare_stages: int
    scan_warps: int
    scan_stages: int
    backward_scan_stages: int
    inputs_warps: int
    inputs_block: int
    inputs_stages: int


def chunk_config(padded_key_width: int, full_precision: bool) -> ChunkConfig:
    """From the widths and the operands' type alone: a sequence's bits may not depend on what else is in the batch."""
    wide = padded_key_width > 128
    return ChunkConfig(
        prepare_warps=2,
        prepare_block=32,
        prepare_columns=64,
        prepare_stages=1 if full_precision else 2,
        scan_warps=8 if wide else 4,
        scan_stages=1 if full_precision or wide else 3,
        backward_scan_stages=1 if full_precision or wide else 2,
        inputs_warps=4,
        inputs_block=64,
        inputs_stages=1 if full_precision else 2,
    )


def backward_scan_tile(
    config: ChunkConfig, halves: int, padded_value_width: int, multiprocessors: int
) -> tuple[int, int]:
    """Value columns and warps of a program of the backward's scans, of which a multiprocessor holds one.

    128 columns take 1.45 times as long as 64 (an H200), so they win where they spare enough turns of the device. The
    choice follows the batch size and changes no bit: no sum runs along V.
    """
    programs = halves * (padded_value_width // 64)
    pipelined = config.backward_scan_stages > 1
    if pipelined and padded_value_width >= 128:
        if 1.45 * cdiv(programs // 2, multiprocessors) < cdiv(programs, multiprocessors):
            return 128, 8
    return 64, config.scan_warps


@dataclass(frozen=True)
class OutputConfig:
    """The output stage: values to a block, warps, the most registers to a thread (None: the compiler's choice), columns
    of q to a product.

    stages: None for one block to a program. Otherwise the programs that fit the device, ``programs`` to a
    multiprocessor, take the blocks in turns through a software pipeline of that depth.
    """

    block_v: int
    num_warps: int
    registers: int | None = None
    step_k: int = 256
    stages: int | None = None
    programs: int = 1


def output_config(
    padded_key_width: int,
    value_width: int,
    chunk_size: int,
    full_precision: bool,
    from_keys: bool,
    block_v: int | None,
) -> OutputConfig:
    """``block_v`` is the caller's wish, or None; where 128 values do not fit shared memory, it is met in blocks of 64.
    ``from_keys``: the weights are made from k, not given.

    The cap on registers is as much a floor: ptxas takes what it allows to have more loads on their way at once. Which
    one is best goes with the form: without one, three programs of the gk form share a multiprocessor, and more loads
    each lose; with keys, two programs that load all at once are best. An H200's, docs/performance/output.md.
    """
    small = padded_key_width <= 128 and chunk_size <= 64 and not full_precision
    if block_v is None:
        block_v = 128 if small and value_width > 64 else 64
    if full_precision and chunk_size > 64:
        block_v = min(block_v, 64)
    if not small:
        return OutputConfig(block_v, num_warps=8, step_k=64 if full_precision else 256)
    registers = {(128, True): 200, (128, False): None, (64, True): 128}.get((block_v, from_keys), 168)
    return OutputConfig(block_v, num_warps=4, registers=registers)
