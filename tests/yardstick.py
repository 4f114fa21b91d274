"""CONTRACT section 4's yardstick: how far an operator may be from FP64 on the very tensors it was given."""

import torch

# Relative RMS error of a whole tensor, by the dtype of q, k, v. 16-bit rows leave room for one rounding of each operand
# of a matrix product (2^-9 for bf16, 2^-12 for fp16, relative), FP32 rows for IEEE arithmetic over long sums.
# "o" is for random unit keys with K >= 64, "o_any" for any unit keys, "max" for max abs error / max abs.
YARDSTICK = {
    "bf16": {"o": 6e-3, "o_any": 1.2e-2, "state": 6e-3, "grad": 8e-3, "gate_grad": 2e-2, "max": 3e-2},
    "fp16": {"o": 1e-3, "o_any": 2e-3, "state": 1e-3, "grad": 1.5e-3, "gate_grad": 4e-3, "max": 5e-3},
    "fp32_chunk": {"o": 2e-5, "o_any": 2e-5, "state": 2e-5, "grad": 1e-4, "gate_grad": 1e-3, "max": 1e-4},
    "fp32": {"o": 1e-5, "o_any": 1e-5, "state": 1e-5, "grad": 1e-5, "gate_grad": 1e-4, "max": 1e-5},
}

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp32_chunk": torch.float32}


def rms_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||, in FP64; plain ||got|| where the right value is zero. NaN anywhere gives inf."""
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape, (got.shape, want.shape)
    if not torch.isfinite(got).all():
        return float("inf")
    norm = want.norm().item()
    return (got - want).norm().item() / (norm if norm > 0 else 1.0)


def max_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """max |got - want| / max |want|."""
    got, want = got.detach().double(), want.detach().double()
    if not torch.isfinite(got).all():
        return float("inf")
    if want.numel() == 0:
        return 0.0
    scale = want.abs().max().item()
    return (got - want).abs().max().item() / (scale if scale > 0 else 1.0)


def check(name: str, got: torch.Tensor, want: torch.Tensor, row: str, kind: str) -> None:
    """Asserts that ``got`` is within the yardstick's ``row`` ("bf16", "fp16", "fp32_chunk", "fp32") and ``kind``."""
    limits = YARDSTICK[row]
    error = rms_error(got, want)
    assert error <= limits[kind], f"{name}: relative RMS error {error:.3e} above {limits[kind]:.0e} ({row}, {kind})"
    worst = max_error(got, want)
    limit = max(limits["max"], limits[kind])  # FP32's gate gradients: sums over tokens of either sign, which cancel
    assert worst <= limit, f"{name}: max error / max {worst:.3e} above {limit:.0e} ({row})"


def unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of unit norm over the last axis."""
    return torch.nn.functional.normalize(x.double(), dim=-1).to(x.dtype)
