"""A small numpy reference model for Llama-family GGUF files, over the paged KV cache that kvferry carries.

It serves the demo and the end-to-end tests: two workers that hold the same bytes compute the same bits.
"""
