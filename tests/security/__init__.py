"""Attacks on a running harness, by another user of the machine where the test may become one."""
