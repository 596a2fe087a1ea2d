"""Recorded routes: the record, its codec, and the sources from which a pass takes its routes."""
