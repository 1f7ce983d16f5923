"""One file or folder for each engine; each third-party engine is imported in its own only."""
