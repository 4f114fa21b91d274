"""Kimi Delta Attention (KDA) for torchtitan.

``titan_kda.kernels`` holds the operators and needs torch and triton alone; ``titan_kda.KimiDeltaAttention`` is the
layer; ``titan_kda.register`` plugs the models into torchtitan. This module imports none of them, so that each can be
used without the others.
"""

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .attention import KimiDeltaAttention

__all__ = ["KimiDeltaAttention", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "KimiDeltaAttention":
        from .attention import KimiDeltaAttention

        return KimiDeltaAttention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
