"""The names that users' reward functions import, under their first address; they are at jaxthd.rl.rewards."""

from jaxthd.rl.rewards import Group as Group
from jaxthd.rl.rewards import Rewarded as Rewarded
from jaxthd.rl.rewards import RewardFailure as RewardFailure
