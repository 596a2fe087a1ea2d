"""Checks that a run is going to work.

They cover the environment, the checkpoint, one real request, and a probe of both engines at the same weights.
"""
