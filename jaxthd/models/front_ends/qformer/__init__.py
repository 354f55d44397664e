"""FastConformer, and a Q-Former that makes a chunk's audio tokens (Li et al., BLIP-2, 2023)."""
