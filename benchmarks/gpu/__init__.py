"""What only a GPU shows, in stages that fit into borrowed minutes: `python -m benchmarks.gpu`."""
