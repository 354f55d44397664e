"""Rewards for answers that a model drew: built-in functions, and users' own in processes of their own.

Nothing here imports jax, since worker processes use it.
"""

from jaxthd.rl.rewards.group import Group as Group
from jaxthd.rl.rewards.group import Rewarded as Rewarded
from jaxthd.rl.rewards.group import RewardFailure as RewardFailure
