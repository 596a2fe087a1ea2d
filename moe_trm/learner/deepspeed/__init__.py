"""The DeepSpeed learner: ZeRO over unmodified Hugging Face models."""
