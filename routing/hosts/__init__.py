"""The inside of the replayers for Megatron-Core and Hugging Face models."""
