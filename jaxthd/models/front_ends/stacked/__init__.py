"""Stacked mel frames and Transformer blocks, as in Nemotron Transcribe (2026)."""
