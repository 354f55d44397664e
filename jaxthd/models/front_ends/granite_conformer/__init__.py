"""Conformer with attention in blocks and a Q-Former (Granite Speech, 2025)."""
