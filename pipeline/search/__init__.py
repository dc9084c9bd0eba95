"""The search: the least memory with which a training reaches a throughput."""
