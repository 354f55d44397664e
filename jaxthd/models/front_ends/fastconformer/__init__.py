"""FastConformer (Rekesh et al., Fast Conformer, 2023)."""
