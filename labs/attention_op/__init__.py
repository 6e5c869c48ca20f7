"""Attention and GELU written by hand, forward and backward: in Python, in C++, and as C++ loops.

    python -m labs.attention_op             # check every operator against PyTorch, then time it
    python -m labs.attention_op.exercise    # check the backward passes that you wrote

    from labs.attention_op import attention, gelu, MultiHeadAttention, use_in
    out = attention(q, k, v, mask=padding, causal=True, backend="cpp")    # (B, H, S, D) each
    y = gelu(x, backend="cpp")
    use_in(model, "cpp")                           # replace every nn.MultiheadAttention of a model

Begin with gelu_python.py and attention_python.py, which derive the formulas.
"""

import engine  # noqa: F401  before PyTorch, whose threads read their settings once
from labs.attention_op.module import MultiHeadAttention, use_in
from labs.attention_op.operators import attention, gelu

__all__ = ["MultiHeadAttention", "attention", "gelu", "use_in"]
