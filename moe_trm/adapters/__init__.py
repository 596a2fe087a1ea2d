"""Corrections and routes inside of other people's trainers. Each module imports its host when it is used, not before.

docs/library.md says what each host gives, what was read of it, and what is proved.
"""
