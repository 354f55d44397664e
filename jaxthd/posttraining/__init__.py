"""What a step of reinforcement learning is made of: groups drawn and rewarded, packed, and compared."""
