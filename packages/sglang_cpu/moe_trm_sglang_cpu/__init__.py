"""CPU support for an unmodified SGLang. Inert unless SGLANG_USE_CPU_ENGINE=1; gives way to every real package."""
