"""Mutants: small wrong changes of the source, each of which some test must notice."""
