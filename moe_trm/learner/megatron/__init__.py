"""The learner on Megatron-Core: layout checks, model building, weight conversion, training.

Import its modules directly; importing this package loads nothing.
"""
