"""Experiments: arms x seeds from one file, run unattended, with a page and a table at the end."""
