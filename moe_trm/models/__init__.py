"""The families of models that are known by name, one file each: tensor names, router, and a tiny shape for tests."""
