"""The audio encoder of Qwen3-ASR and Qwen3-Omni (2025)."""
