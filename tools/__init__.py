import engine  # noqa: F401  (before PyTorch; see engine/__init__.py)
