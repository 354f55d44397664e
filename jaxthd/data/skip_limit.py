"""The largest share of a data set that a run may skip (data.max_skipped_share)."""

from jaxthd.config import DataConfig
from jaxthd.data.inventory import Inventory, SetCount
from jaxthd.data.skipped import SkipLog, least_share, main_reasons, set_of_key
from jaxthd.errors import UserError


class SkipLimit:
    """Judges each data set by itself: a set with a tenth of the items may be half of what is drawn.

    skipped: the items that are skipped and read. is_training: False: a set is refused only if nothing of it
    can be used.
    """

    def __init__(
        self, data: DataConfig, inventory: Inventory, skipped: SkipLog, *, is_training: bool
    ) -> None:
        self._data, self._inventory, self._skipped = data, inventory, skipped
        self._is_training = is_training

    def check(self) -> None:
        """Raises UserError where too large a share of a set cannot be used.

        The items that this call has read decide, and recordings that the inventory has not found.
        """
        most = self._data.max_skipped_share
        for count in self._inventory.sets:
            share = self._unusable_share(count)
            if share > most if self._is_training else share == 1.0:
                raise UserError(self._text(count))

    def _unusable_share(self, count: SetCount) -> float:
        """Returns the share of a set's items that cannot be used, at least."""
        title, usable = count.source.title, len(count.examples)
        if not count.items:
            return 0.0
        is_training = count.source.setting.split == "training"
        # A copy: the count's thread may add to it meanwhile.
        unread = len({key for key in list(count.lost) if not self._skipped.has(title, set_of_key(key)[1])})
        bad = max(self._skipped.count([title]) - count.skipped, 0)
        by_reading = least_share(
            bad, self._skipped.read_of(title), usable, is_sample=is_training and self._data.shuffle
        )
        by_count = (bad + unread) / usable if usable else 0.0
        return (count.skipped + usable * max(by_reading, by_count)) / count.items

    def _text(self, count: SetCount) -> str:
        """Says what was skipped of a set, and why."""
        title, reasons = count.source.title, self._skipped.reasons([count.source.title], this_call=True)
        whys = [*reasons, *list(count.lost.values())[: max(len(count.lost) - len(reasons), 0)]]
        read = min(self._skipped.read_of(title), len(count.examples))
        of = f"{read + count.skipped:,} read so far, of {count.items:,}" if read else f"{count.items:,}"
        which, most = f"{title} ({count.source.setting.field})", self._data.max_skipped_share
        if self._is_training:
            verdict = f"more than data.max_skipped_share {most:g} of {which} cannot be used"
        else:
            verdict = f"nothing of {which} can be used"
        return (
            f"{verdict}: {len(whys):,} items of {of}: {main_reasons(whys)}; {self._skipped.path} lists those "
            "that were read. Correct the data, raise data.max_skipped_share, or start a new run with larger "
            "capacities"
        )
