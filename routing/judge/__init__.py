"""Flips of recorded against live routes, by token, sample and layer, and the bounds on them."""
