"""What model.py and decoding.py compute, in less time. Read those first; the tests hold these files to them.

fused.py: training on a CPU. compiled.py: greedy decoding on a CPU; packed.py: where there is no compiler. captured.py: on a GPU.
"""
