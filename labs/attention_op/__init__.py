"""Attention and GELU written by hand, forward and backward: in Python and in C++.

    python -m labs.attention_op      # check every operator against PyTorch, then time it

    from labs.attention_op import attention, gelu, MultiHeadAttention, use_in
    out = attention(q, k, v, mask=padding, causal=True, backend="cpp")    # (B, H, S, D) each
    y = gelu(x, backend="cpp")
    use_in(model, "cpp")                           # replace every nn.MultiheadAttention of a model

Begin with gelu_python.py and attention_python.py, which derive the formulas.
"""

__all__ = ["MultiHeadAttention", "attention", "gelu", "use_in"]


def __getattr__(name: str):
    # Python calls this for a name that the package does not have yet (PEP 562). So PyTorch is only
    # imported when an operator is used, and `python -m labs.attention_op --help` answers at once.
    if name in ("MultiHeadAttention", "use_in"):
        from labs.attention_op import module as home
    elif name in __all__:
        from labs.attention_op import operators as home
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(home, name)
