"""Checks that every start makes before anything is loaded."""
