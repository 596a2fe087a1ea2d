"""Low-rank adapters: which matrices have one, their factors, merged weights, and peft's files."""
