"""`python -m baton doctor`: what would break, said before 60 GB are loaded; facts first, then checks."""
