"""The embedded engine: transformers' gpt-oss over our own paged KV pool."""
