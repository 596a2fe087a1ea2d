"""Verdicts: figures of a run as a sentence, and the setting to change."""
