"""Whisper's encoder (Radford et al., 2022), as speech LLMs have it."""
