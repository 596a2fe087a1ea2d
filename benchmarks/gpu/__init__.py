"""Measurements that need a GPU, in stages that fit into borrowed minutes: `python -m benchmarks.gpu`."""
