"""MoE-TRM's part of a vLLM server: weights that are loaded, digested and named."""
