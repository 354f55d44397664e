"""Runs that faults are injected into from outside, and what must come of them (scripts/soak.py)."""
