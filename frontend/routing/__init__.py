"""Which worker answers, and again which when one is lost."""
