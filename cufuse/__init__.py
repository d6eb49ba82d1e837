"""Transformer and Mixture-of-Experts inference as fused CUDA kernels, without PyTorch."""
