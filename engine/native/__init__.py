"""Kernels in C++ for a CPU, each beside the plain PyTorch that computes the same."""
