"""The small, correct engine: transformers' gpt-oss over our own paged KV pool."""
