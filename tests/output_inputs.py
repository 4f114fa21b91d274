"""Inputs of the output stage, and its definition a row at a time, written without the code under test."""

import math

import torch
from kda_inputs import LOG2_E, chunks, cumulative, offsets

NAN = float("nan")


def stage_inputs(tokens, *, batch=1, heads=2, query_heads=None, lengths=None, key_width=12, value_width=20, size=64,
                 form="none", a_qk=False, dtype=torch.float32, nats=-0.2, seed=0):  # fmt: skip
    """Token-major inputs by name, with garbage (NaN) above a_qk's diagonal."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query_heads = query_heads or heads
    cu_seqlens = None if lengths is None else offsets(lengths)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k = (torch.nn.functional.normalize(normal(batch, tokens, query_heads, key_width), dim=-1) for _ in range(2))
    count = sum(1 for _ in chunks((batch, tokens), cu_seqlens, size))
    h_shape = (batch, count // batch) if lengths is None else (count,)
    inputs = dict(q=q, k=k, v_new=normal(batch, tokens, heads, value_width))
    inputs["h"] = normal(*h_shape, heads, key_width, value_width)
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    if form == "g":
        gate = 2 * nats * LOG2_E * torch.rand(batch, tokens, heads, generator=generator, dtype=torch.float64)
        inputs["g"] = cumulative(gate, cu_seqlens, size).to(wide)
    if form == "gk":
        gate = 2 * nats * LOG2_E * torch.rand(batch, tokens, heads, key_width, generator=generator, dtype=torch.float64)
        inputs["gk"] = cumulative(gate, cu_seqlens, size).to(wide)
    if form == "gk" or a_qk:
        inputs["a_qk"] = torch.full((batch, tokens, heads, size), NAN, dtype=dtype)
        for b, rows in chunks((batch, tokens), cu_seqlens, size):
            for i in range(rows.stop - rows.start):
                inputs["a_qk"][b, rows.start + i, :, : i + 1] = normal(heads, i + 1).to(dtype)
        del inputs["k"]
    return inputs, cu_seqlens


def by_rows(q, v_new, h, k=None, g=None, gk=None, a_qk=None, scale=None, cu_seqlens=None, size=64, l2norm_q=False):
    """o_i = scale (sum over channels of q_i 2^(G_i) h + sum over j <= i of a_ij v_j), a row at a time, in FP64."""
    q, v_new, h, k, g, gk, a_qk = (None if x is None else x.double() for x in (q, v_new, h, k, g, gk, a_qk))
    batch, tokens, heads, _ = v_new.shape
    group = heads // q.shape[2]
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    o = torch.zeros_like(v_new)
    starts = h.flatten(0, 1) if cu_seqlens is None else h
    for index, (b, rows) in enumerate(chunks((batch, tokens), cu_seqlens, size)):
        for t in range(rows.start, rows.stop):
            for head in range(heads):
                row = q[b, t, head // group]
                decay = (
                    gk[b, t, head] if gk is not None else g[b, t, head] if g is not None else torch.zeros(1).double()
                )
                total = (row * 2**decay) @ starts[index, head]
                past = slice(rows.start, t + 1)
                if a_qk is not None:
                    weights = a_qk[b, t, head, : t + 1 - rows.start]
                else:
                    weights = k[b, past, head // group] @ row
                    if g is not None:
                        weights = weights * 2 ** (g[b, t, head] - g[b, past, head])
                total = total + weights @ v_new[b, past, head]
                norm = 1 / math.sqrt(row @ row + 1e-6) if l2norm_q else 1.0
                o[b, t, head] = scale * norm * total
    return o
