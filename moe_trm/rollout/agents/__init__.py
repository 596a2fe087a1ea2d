"""Agents that talk with the policy over an OpenAI-compatible address: token-exact sessions and their records."""
