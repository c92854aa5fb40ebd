"""Llama, Mistral, Qwen2 and Qwen3 decoders that run any band of layers over any set of tokens."""
