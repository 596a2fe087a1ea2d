"""Advantages: rewards of a group compared, per answer and per token."""
