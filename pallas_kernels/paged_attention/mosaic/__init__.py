"""Paged attention as Mosaic GPU kernels, for NVIDIA Hopper."""
