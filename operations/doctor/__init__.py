"""`python -m baton doctor`: probes gather facts and checks find what would break, before 60 GB are loaded."""
