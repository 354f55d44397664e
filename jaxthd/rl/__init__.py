"""Reinforcement learning, from rewards to rollouts: the parts of jaxthd grpo.

Nothing is imported here: worker processes of rewards do without jax.
"""
