"""Measure what training optimizations do to GPU memory and throughput, and track it in MLflow."""
