"""Needs and duration of a run, from config.json and the configuration alone. Imports no torch."""
