"""KDA's operators. Importing this compiles nothing and needs no GPU."""

from ._operator import implementation
from .chunk import chunk_kda
from .gate import bounded_gate_cumsum, softplus_gate_cumsum
from .l2norm import l2norm
from .output import chunk_fwd_o_vk, chunk_output
from .recurrent import recurrent_kda, recurrent_kda_step
from .recurrent_conv_step import recurrent_kda_conv_step
from .reference import naive_chunk_kda, naive_recurrent_kda
from .short_conv import causal_conv1d
from .short_conv_step import causal_conv1d_step

__all__ = [
    "bounded_gate_cumsum",
    "causal_conv1d",
    "causal_conv1d_step",
    "chunk_fwd_o_vk",
    "chunk_kda",
    "chunk_output",
    "implementation",
    "l2norm",
    "naive_chunk_kda",
    "naive_recurrent_kda",
    "recurrent_kda",
    "recurrent_kda_conv_step",
    "recurrent_kda_step",
    "softplus_gate_cumsum",
]
